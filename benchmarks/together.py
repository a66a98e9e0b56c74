"""A stand-in for a training program: ranks that step together, save, and resume. No torch, so it
starts at once.

A step is some sleep on every rank and one exchange through rank 0 over TCP, so a dead or frozen
rank stops all of them, as a collective does. Rank 0 saves every few steps, whole or not at all. It
runs under orch and under torchrun, on the same few variables, and finds rank 0 by the address and
port that its launcher has given it: ranks that were told different ones never meet. Environment:
TOGETHER_DIR, TOGETHER_STEP_S, TOGETHER_SAVE_EVERY, TOGETHER_TIMEOUT_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ADDRESS = os.environ["MASTER_ADDR"]
PORT = os.environ["MASTER_PORT"]
OURS = "ORCH_EPOCH" in os.environ
LIFE = int(os.environ["ORCH_EPOCH"] if OURS else os.environ["TORCHELASTIC_RESTART_COUNT"])
HOME = Path(os.environ.get("TOGETHER_DIR") or os.environ["ORCH_RUN_DIR"])
STEP_S = float(os.environ.get("TOGETHER_STEP_S", "0.05"))
SAVE_EVERY = int(os.environ.get("TOGETHER_SAVE_EVERY", "5"))
TIMEOUT_S = float(os.environ.get("TOGETHER_TIMEOUT_S", "20"))
STEPS = int(os.environ.get("TOGETHER_STEPS", "1000000"))
BATCH = 12  # samples a step, whatever the number of ranks
PEER_GONE = 75 if OURS else 1  # orch: saved or nothing to save, wants to be started again
told = False


def hear(*_: object) -> None:
    global told
    told = True


def write(path: Path, content: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(content)
    part.replace(path)


def save(path: Path, step: int) -> None:
    with contextlib.suppress(
        OSError
    ):  # a full disk: the one before is still there, and the next may succeed
        write(path, str(step))


def meet() -> list[socket.socket]:
    """Rank 0: connections to all others. The others: one to rank 0."""
    place = HOME / f"meet-{ADDRESS}-{PORT}-{LIFE if OURS else 'x'}"
    if RANK == 0:
        server = socket.create_server((ADDRESS, 0))
        server.settimeout(TIMEOUT_S)
        write(place, json.dumps([*server.getsockname()[:2]]))
        return [server.accept()[0] for _ in range(WORLD - 1)]
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        try:
            host, port = json.loads(place.read_text())
            return [socket.create_connection((host, port), timeout=TIMEOUT_S)]
        except (OSError, ValueError):
            time.sleep(0.02)
    raise TimeoutError(f"rank {RANK}: nobody has come to {ADDRESS}:{PORT}")


def exchange(others: list[socket.socket], mine: int) -> int:
    """The sum over all ranks of a number below 10."""
    for other in others:
        other.settimeout(TIMEOUT_S)
    if RANK:
        others[0].sendall(b"%d" % mine)
        return int(take(others[0]))
    total = mine + sum(int(take(other)) for other in others)
    for other in others:
        other.sendall(b"%d" % min(total, 9))
    return total


def take(other: socket.socket) -> bytes:
    if not (got := other.recv(1)):
        raise ConnectionResetError("a peer is gone")
    return got


def report(step: int, seconds: float) -> None:
    line = {
        "kind": "step",
        "rank": RANK,
        "epoch": LIFE,
        "step": step,
        "samples": step * BATCH,
        "tokens": BATCH,
    }
    line |= {"step_s": seconds, "loss": 5.0 / step}
    if OURS:
        with contextlib.suppress(BlockingIOError):
            os.write(int(os.environ["ORCH_REPORT_FD"]), json.dumps(line).encode() + b"\n")
    elif RANK == 0:
        with (HOME / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **line}) + "\n")


def main() -> int:
    if OURS:
        signal.signal(signal.SIGTERM, hear)
    write(HOME / f"pid-{RANK}", f"{os.getpid()} {os.getppid()} {LIFE}")
    saved = HOME / "saved"
    try:
        others = meet()
        step = int(saved.read_text()) if saved.exists() else 0
        while step < STEPS:
            start = time.perf_counter()
            if exchange(others, int(told)):
                if RANK == 0:
                    save(saved, step)
                exchange(others, 0)  # nobody leaves before it is saved
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                return 75
            time.sleep(STEP_S)
            step += 1
            exchange(others, 0)
            report(step, time.perf_counter() - start)
            if RANK == 0 and step % SAVE_EVERY == 0:
                save(saved, step)
    except (OSError, ValueError) as error:
        print(f"rank {RANK}: {error}", file=sys.stderr)
        return PEER_GONE
    return 0


if __name__ == "__main__":
    sys.exit(main())
