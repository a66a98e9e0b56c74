"""A stand-in for the trainer: no torch, speaks the report protocol, and misbehaves on request.

What to do comes from the environment, as ORCH_TEST_<WORD>: STEPS, STEP_S,
DIE="rank:step:code[:epoch]" (a negative code is a signal), SAVE=1 (answer SIGTERM by saving and
leaving with 75), DEAF=1 (ignore SIGTERM), SPAWN=1 (leave a grandchild in a session of its own),
GARBAGE=1, LEARN=1 (losses that show any step that was lost or done twice), HOLD=1 (wait before the
last step until the run folder has a file `go`), MEET=1 (have a pulse, and meet all others at each
step), HANG="rank:step:how:turn" (how: spin, stuck, held, stopped, or apart: all meet, and nobody
gets away; turn: 0 for the first of these faults, the next one in an epoch after it; the file
hung-<turn> has the epoch), SLOW="rank or node:factor" (own compute time),
SAY="rank:step:cause:epoch" (fail, and say of what).
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
EPOCH = int(os.environ["ORCH_EPOCH"])
RUN = Path(os.environ["ORCH_RUN_DIR"])


def wish(variable: str, default: str = "") -> str:
    return os.environ.get(f"ORCH_TEST_{variable}", default)


def report(**fields: object) -> None:
    line = json.dumps({"rank": RANK, "epoch": EPOCH, **fields}).encode() + b"\n"
    os.write(int(os.environ["ORCH_REPORT_FD"]), line)


DOING = {"step": 0, "phase": "start", "waiting": None, "moves": 0}


def pulse() -> None:
    while True:
        report(kind="pulse", **DOING)
        time.sleep(0.2)


def meet(step: int, apart: bool) -> bool:
    """Wait until all ranks are at this step; False when one of them is gone."""
    DOING.update(phase="comm", waiting="all-reduce (dp)", moves=DOING["moves"] + 1)
    step_file = RUN / f"at-{EPOCH}-{RANK}"
    step_file.with_suffix(".new").write_text(str(step))
    step_file.with_suffix(".new").rename(step_file)
    other_ranks = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != RANK]
    while apart or any(at(rank) < step for rank in other_ranks):
        departures = (
            path.exists() and not alive(int(path.read_text() or 1))
            for path in map(pid_file, other_ranks)
        )
        if not apart and any(departures):
            return False
        time.sleep(0.02)
    DOING.update(waiting=None)
    return True


def at(rank: int) -> int:
    path = RUN / f"at-{EPOCH}-{rank}"
    return int(path.read_text()) if path.exists() else -1


def pid_file(rank: int) -> Path:
    return RUN / f"pid-{EPOCH}-{rank}"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def hang(kind: str) -> None:
    if kind == "spin":
        while True:
            pass
    elif kind == "stuck":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "held":
        re.match(r"(a+)+$", "a" * 64 + "b")  # backtracks for years, and holds the interpreter
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> int:
    stop = []
    # Of the next fault: those before it have ended an epoch each.
    turn = len(list(RUN.glob("hung-*")))
    faulthandler.register(signal.SIGQUIT)
    if wish("MEET"):
        threading.Thread(target=pulse, daemon=True).start()
    if wish("DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif wish("SAVE"):
        signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    if wish("SPAWN"):
        path = RUN / f"grandchild-{RANK}"
        code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        while not (path.exists() and path.read_text()):  # made, then written
            time.sleep(0.01)
    (RUN / f"pid-{EPOCH}-{RANK}").write_text(str(os.getpid()))
    saved = RUN / f"saved-{RANK}"
    first = int(saved.read_text()) if saved.exists() else 0
    weight = float((RUN / f"weight-{RANK}").read_text()) if saved.exists() else 0.3
    print(f"rank {RANK} of {os.environ['WORLD_SIZE']} starts after step {first}", flush=True)
    if wish("GARBAGE"):
        os.write(
            int(os.environ["ORCH_REPORT_FD"]),
            b"garbage\n{\n" + b"x" * 100_000 + b"\n" + b'{"kind":"step"}\n',
        )

    def save(step: int) -> int:
        (RUN / f"weight-{RANK}").write_text(repr(weight))
        saved.write_text(str(step))
        report(kind="event", name="checkpoint_saved", step=step)
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # a second one while the interpreter ends would kill
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
        own_s = float(wish("STEP_S", "0.02"))
        for order in filter(None, wish("SLOW").split(",")):
            who, factor = order.split(":")
            own_s *= float(factor) if who in (str(RANK), os.environ["ORCH_NODE"]) else 1
        for order in filter(None, wish("SAY").split(",")):
            rank, at_step, cause, epoch = order.split(":")
            if (int(rank), int(at_step), int(epoch)) == (RANK, step, EPOCH):
                report(
                    kind="event",
                    name="failed",
                    fields={"cause": cause, "error": f"{cause} at step {step}"},
                )
                return 1
        if wish("MEET"):
            time.sleep(max(0.0, own_s - float(wish("STEP_S", "0.02"))))
            orders = [order.split(":") for order in filter(None, wish("HANG").split(","))]
            due = [
                (int(rank), kind) for rank, s, kind, t in orders if (int(s), int(t)) == (step, turn)
            ]
            own_hangs = [kind for rank, kind in due if rank == RANK]
            apart = any(kind == "apart" for _, kind in due)
            DOING.update(step=step, phase="forward", moves=DOING["moves"] + 1)
            if own_hangs:
                (RUN / f"hung-{turn}").write_text(str(EPOCH))
            for kind in own_hangs:
                hang(kind)
            if not meet(step, apart):
                return 75
        weight = 3.9 * weight * (1 - weight)  # chaotic: each value tells the whole history
        loss = weight if wish("LEARN") else 5.0 / step
        fields = {
            "samples": step * 8,
            "tokens": 128,
            "step_s": 0.02,
            "loss": loss,
            "lr": 0.1,
            "grad_norm": 1.5,
        }
        extra = {
            "memory_bytes": {"params": 100 + RANK, "total": 200},
            "comm_bytes": {"dp": 64},
            "mfu": 0.25,
        }
        report(
            kind="step",
            step=step,
            **fields,
            **extra,
            phase_s={"forward": 0.01},
            comm_s={"dp": 0.001},
            own_s=own_s,
        )
        if stop:
            return save(step)
    report(kind="event", name="done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
