"""A training program that needs a process beside it, as loaders of data do: if that one dies, so
does the next step.

It goes on until its run's folder has the file `go`, or until it is asked to save. The helper knows
nothing of signals.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import orch_report


def helper(pipe: Connection) -> None:
    while True:
        pipe.send("a batch")


def main() -> None:
    saved = Path(orch_report.checkpoint_dir(), f"rank-{os.environ['RANK']}.json")
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    print("starts at", step, flush=True)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=helper, args=(theirs,), daemon=True)
    child.start()
    orch_report.save_requested()
    while not Path(os.environ["ORCH_RUN_DIR"], "go").exists():
        time.sleep(0.1)
        ours.recv()
        if not child.is_alive():
            raise SystemExit(f"step {step}: the helper died, exit code {child.exitcode}")
        step += 1
        orch_report.report(step=step, loss=1.0 / step)
        if orch_report.save_requested():
            saved.write_text(json.dumps({"step": step}))
            orch_report.exit_saved(step)
    child.kill()


if __name__ == "__main__":
    main()
