"""`python -m tests.independent.oracle` reads one request per line and answers each with a line;
both are JSON objects.

"prepare" writes the checkpoint from which a harsh case starts. "judge" returns what is wrong with
the runs of a case. `python -m tests.independent` starts this program.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from .judge import judge, prepare


def main() -> int:
    for line in sys.stdin:
        request = json.loads(line)
        if request["verb"] == "prepare":
            prepare(Path(request["run"]), request["loss_scale"], request["good"])
            print("{}", flush=True)
        else:
            runs = [Path(run) for run in request["runs"]]
            print(json.dumps(answer(runs, request["start"])), flush=True)
    return 0


def answer(runs: list[Path], start: str) -> dict[str, Any]:
    """Returns the findings of `judge`, as JSON."""
    began = time.monotonic()
    findings = judge(runs, start)
    worst = {
        quantity: {"error": error, "bound": bound, "where": location}
        for quantity, (error, bound, location) in findings.worst.items()
    }
    seconds = round(time.monotonic() - began, 2)
    counts = {"steps": findings.steps, "skipped": findings.skipped, "seconds": seconds}
    return counts | {"worst": worst, "problems": findings.problems}


if __name__ == "__main__":
    sys.exit(main())
