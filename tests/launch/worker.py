"""A stand-in for the trainer: no torch, speaks the report protocol, and misbehaves on request.

What to do comes from the environment, as ORCH_TEST_<WORD>: STEPS, STEP_S, DIE="rank:step:code[:epoch]" (a negative code
is a signal), SAVE=1 (answer SIGTERM by saving and leaving with 75), DEAF=1 (ignore SIGTERM), SPAWN=1 (leave a
grandchild in a session of its own), GARBAGE=1, LEARN=1 (losses that show any step that was lost or done twice), HOLD=1
(wait before the last step until the run folder has a file `go`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK, EPOCH = int(os.environ["RANK"]), int(os.environ["ORCH_EPOCH"])
RUN = Path(os.environ["ORCH_RUN_DIR"])


def wish(word: str, default: str = "") -> str:
    return os.environ.get(f"ORCH_TEST_{word}", default)


def report(**fields: object) -> None:
    line = json.dumps({"rank": RANK, "epoch": EPOCH, **fields}).encode() + b"\n"
    os.write(int(os.environ["ORCH_REPORT_FD"]), line)


def main() -> int:
    stop = []
    if wish("DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif wish("SAVE"):
        signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    if wish("SPAWN"):
        path = str(RUN / f"grandchild-{RANK}")
        code = f"import os, time; open({path!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        while not (RUN / f"grandchild-{RANK}").exists():
            time.sleep(0.01)
    (RUN / f"pid-{EPOCH}-{RANK}").write_text(str(os.getpid()))
    saved = RUN / f"saved-{RANK}"
    first = int(saved.read_text()) if saved.exists() else 0
    weight = float((RUN / f"weight-{RANK}").read_text()) if saved.exists() else 0.3
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']} starts after step {first}", flush=True)
    if wish("GARBAGE"):
        os.write(int(os.environ["ORCH_REPORT_FD"]), b"garbage\n{\n" + b"x" * 100_000 + b"\n" + b'{"kind":"step"}\n')

    def save(step: int) -> int:
        (RUN / f"weight-{RANK}").write_text(repr(weight))
        saved.write_text(str(step))
        report(kind="event", name="checkpoint_saved", step=step)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one while the interpreter ends would kill
        return 75

    for step in range(first + 1, int(wish("STEPS", "3")) + 1):
        time.sleep(float(wish("STEP_S", "0.02")))
        while wish("HOLD") and step == int(wish("STEPS", "3")) and not (RUN / "go").exists():
            if stop:
                return save(step - 1)
            time.sleep(0.05)
        for order in filter(None, wish("DIE").split(",")):
            rank, at, code, *epochs = map(int, order.split(":"))
            if (rank, at) == (RANK, step) and (not epochs or EPOCH in epochs):
                print(f"dying with {code} before step {step}", flush=True)
                if code < 0:
                    os.kill(os.getpid(), -code)
                    time.sleep(60)
                return code
        weight = 3.9 * weight * (1 - weight)  # chaotic: each value tells the whole history
        loss = weight if wish("LEARN") else 5.0 / step
        fields = {"samples": step * 8, "tokens": 128, "step_s": 0.02, "loss": loss, "lr": 0.1, "grad_norm": 1.5}
        extra = {"memory_bytes": {"params": 100 + RANK, "total": 200}, "comm_bytes": {"dp": 64}, "mfu": 0.25}
        report(kind="step", step=step, **fields, **extra, phase_s={"forward": 0.01}, comm_s={"dp": 0.001})
        if stop:
            return save(step)
    report(kind="event", name="done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
