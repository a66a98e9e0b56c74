"""A user's program that reports: it saves its step when it is asked to, and goes on from there. No
torch, no orch.

Arguments: steps, seconds of a step; if given, seconds of a step as it tells them.
"""

import sys
import time

import orch_report

steps = int(sys.argv[1])
step_s = float(sys.argv[2])
step_fields = {"step_s": float(sys.argv[3])} if len(sys.argv) > 3 else {}
state = orch_report.checkpoint_dir() / f"rank-{orch_report._worker.rank}"
first = int(state.read_text()) if state.exists() else 0
orch_report.save_requested()  # from here on SIGTERM does not end this process
print("starts after step", first, flush=True)
for step in range(first + 1, steps + 1):
    time.sleep(step_s)
    orch_report.report(step=step, loss=1.0 / step, tokens=100, samples=step * 4, **step_fields)
    if orch_report.save_requested():
        state.write_text(str(step))
        orch_report.exit_saved(step)
