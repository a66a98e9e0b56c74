"""Saves a worker's stacks: its own (faulthandler, on SIGQUIT) and the kernel's."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from orchestrator.run.processes import Identity, is_stopped, send_signal

from .disk import Disk

_WAIT_S = 1.0  # for the worker's own stacks
_LOOK_S = 0.05  # between two looks at its log
_MAX_BYTES = 1 << 18
_TAIL_BYTES = 8192
_TAIL_LINES = 20
_TAIL_WIDTH = 500
_STATUS_FIELDS = (
    "State",
    "Threads",
    "VmRSS",
    "SigPnd",
    "ShdPnd",
    "voluntary_ctxt_switches",
    "nonvoluntary_ctxt_switches",
)


async def save_stack(
    worker: Identity,
    log: Path,
    stack_path: Path,
    reason: str,
    disk: Disk,
) -> bool:
    """Writes all that can be learnt about a living worker to `stack_path`; False if it cannot.

    A worker without a handler of its own gets no SIGQUIT, which would kill it. A stopped worker
    cannot answer.
    """
    python_stacks = ""
    if catches(worker.pid, signal.SIGQUIT) and not is_stopped(worker):
        start = await disk.run(lambda: size_of(log), 0)
        send_signal(worker, signal.SIGQUIT)
        python_stacks = await _new_log_text(log, start, disk)
    python_stacks = python_stacks or "The worker itself printed no stacks."
    report = f"{reason}\n\n{kernel_facts(worker.pid)}\n{python_stacks}\n"
    return await disk.run(lambda: _write(stack_path, report), False)


def _write(path: Path, report: str) -> bool:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(
        path,
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW,
        0o600,
    )
    with open(descriptor, "w", errors="replace") as file:
        file.write(report)
    return True


async def _new_log_text(log: Path, start: int, disk: Disk) -> str:
    """Waits until a log stops growing; returns its part after byte `start`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_S
    size = start
    while loop.time() < end:
        await asyncio.sleep(_LOOK_S)
        previous_size = size
        size = await disk.run(lambda: size_of(log), start)
        if size == previous_size > start:
            break
    return await disk.run(lambda: _read_from(log, start), "")


def _read_from(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(_MAX_BYTES).decode(errors="replace")


def catches(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler of its own for a signal."""
    mask = _status(pid).get("SigCgt")
    return mask is not None and bool(int(mask, 16) >> (signum - 1) & 1)


def kernel_facts(pid: int) -> str:
    """Returns the state, threads and kernel waits of a process, as far as this user may see."""
    status = _status(pid)
    lines = [f"{name}: {status[name]}" for name in _STATUS_FIELDS if name in status]
    for thread in sorted(_threads(pid), key=int)[:64]:
        thread_path = f"/proc/{pid}/task/{thread}"
        name = _read(f"{thread_path}/comm")
        kernel_function = _read(f"{thread_path}/wchan")
        kernel_stack = _read(f"{thread_path}/stack")
        if kernel_function in ("", "0"):
            kernel_function = "in user space, or unknown"
        lines.append(f"thread {thread} {name}: {kernel_function}")
        lines += [f"  {line}" for line in kernel_stack.splitlines()]
    return "\n".join(lines) + "\n"


def tail_of(path: Path, start: int) -> list[str]:
    """Returns the last lines of a log after byte `start`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - _TAIL_BYTES))
            log_end = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line[:_TAIL_WIDTH] for line in log_end.splitlines()[-_TAIL_LINES:]]


def _status(pid: int) -> dict[str, str]:
    pairs = (line.partition(":") for line in _read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def size_of(path: Path) -> int:
    """Returns the size of a log in bytes, 0 if there is none or if it cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
