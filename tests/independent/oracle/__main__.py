"""`python -m tests.independent.oracle` reads an order a line, and answers each with a line; both are
JSON objects.

"prepare": write the checkpoint from which a harsh case starts. "judge": what is wrong with the runs
of a case. `python -m tests.independent` starts it.
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
        order = json.loads(line)
        if order["verb"] == "prepare":
            prepare(Path(order["run"]), order["loss_scale"], order["good"])
            print("{}", flush=True)
        else:
            print(
                json.dumps(answer([Path(run) for run in order["runs"]], order["start"])), flush=True
            )
    return 0


def answer(runs: list[Path], start: str) -> dict[str, Any]:
    """What `judge` has found, as JSON."""
    began = time.monotonic()
    found = judge(runs, start)
    worst = {
        what: {"error": e, "bound": bound, "where": at}
        for what, (e, bound, at) in found.worst.items()
    }
    seconds = round(time.monotonic() - began, 2)
    counts = {"steps": found.steps, "skipped": found.skipped, "seconds": seconds}
    return counts | {"worst": worst, "problems": found.problems}


if __name__ == "__main__":
    sys.exit(main())
