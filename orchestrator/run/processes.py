"""Processes of this machine: who is who, who descends from whom, and how to end a whole tree.
Linux.

The supervisor, the agent and the worker supervisor are each a *subreaper* (prctl(2)): a process
whose parent dies becomes the child of the nearest one, so nothing started in a run can leave the
tree, not even by a double fork and `setsid`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import Struct

log = logging.getLogger("orch.processes")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        raise OSError("agents and local runs need Linux (prctl)")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Orphans below this process become its children from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Send `signum` to the calling process when `parent` dies; call it in the child, between fork
    and exec."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signum)


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` call this process, 15 bytes at most."""
    with open("/proc/self/comm", "w") as file:
        file.write(name[:15])


class Identity(Struct, frozen=True):
    """A process beyond the reuse of its number: the kernel's start time (clock ticks since boot)
    goes with the pid."""

    pid: int
    started: int


def _stat(pid: int) -> tuple[int, str, int, int] | None:
    """(parent, state letter, start time, ticks computed) from /proc/<pid>/stat, None when there is
    no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = (
                file.read().rpartition(b")")[2].split()
            )  # the name in parentheses may hold anything
        return (
            int(fields[1]),
            fields[0].decode(),
            int(fields[19]),
            int(fields[11]) + int(fields[12]),
        )
    except (OSError, IndexError):
        return None


class Load(Struct, frozen=True):
    """What the kernel says of a process."""

    # R running, S sleeping, D in a system call that cannot be interrupted, T stopped, Z dead
    state: str
    cpu_s: float  # of all its threads, since it began


def load_of(process: Identity) -> Load | None:
    """None when that process is no more."""
    found = _stat(process.pid)
    if found is None or found[2] != process.started:
        return None
    return Load(found[1], found[3] / os.sysconf("SC_CLK_TCK"))


def identity(pid: int) -> Identity | None:
    found = _stat(pid)
    return Identity(pid, found[2]) if found else None


def is_alive(process: Identity) -> bool:
    """Running: neither gone, nor a zombie, nor another process that got the same number."""
    found = _stat(process.pid)
    return found is not None and found[1] not in "ZX" and found[2] == process.started


def is_stopped(process: Identity) -> bool:
    """Stopped by a signal; a process that a debugger holds is not."""
    found = _stat(process.pid)
    return found is not None and found[1] == "T" and found[2] == process.started


class StopWatch:
    """Whether one process stands still because somebody stopped it, seen at every look at it. It is
    continued at once when it has been stopped for `after` looks, and killed after four times as
    many: something keeps stopping it.
    """

    def __init__(self, after: int):
        self._after = after
        self._looks = 0
        self._process = Identity(0, 0)

    def look(self, pid: int) -> str:
        """What was done about it: "continued", "killed", or "" for nothing."""
        process = identity(pid) or Identity(0, 0)
        stopped = process.pid > 0 and is_stopped(process)
        if process != self._process or not stopped:
            self._process = process
            self._looks = 0
        if not stopped:
            return ""
        self._looks += 1
        if self._looks == 4 * self._after:
            return "killed" if send_signal(process, signal.SIGKILL) else ""
        if self._looks % self._after:
            return ""
        return "continued" if send_signal(process, signal.SIGCONT) else ""


def send_signal(process: Identity, signum: int) -> bool:
    """Signal exactly that process; False when it is no more. A pidfd pins the number between look
    and signal."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(fd, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def _families() -> dict[int, list[int]]:
    """Parent -> its children, zombies left out."""
    families: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _stat(int(name))) and found[1] not in "ZX":
            families.setdefault(found[0], []).append(int(name))
    return families


def children_of(parent: int) -> list[Identity]:
    """Its children, zombies left out."""
    return [one for pid in _families().get(parent, []) if (one := identity(pid))]


def descendants(root: int) -> list[int]:
    """Pids below `root`, zombies left out, parents before children."""
    children = _families()
    found_below = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found_below += below
        queue += below
    return found_below


def holders(path: Path) -> list[Identity]:
    """The processes that have the file open, of those that this user may look into; not this
    process."""
    try:
        file = os.stat(path)
    except OSError:
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # another user's, or gone by now
            process = identity(int(name))
            for fd in os.listdir(f"/proc/{name}/fd"):
                if os.path.samestat(os.stat(f"/proc/{name}/fd/{fd}"), file) and process:
                    found.append(process)
                    break
    return found


def kill_trees(roots: Sequence[Identity]) -> None:
    """SIGKILL these processes and all below them, of which none is asked and none can start others
    in between."""
    below = [
        one
        for root in roots
        if is_alive(root)
        for one in map(identity, descendants(root.pid))
        if one
    ]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in [*roots, *below]:
            with contextlib.suppress(OSError):
                send_signal(process, signum)


def kill_other_children(spare: Collection[int]) -> None:
    """Kills the children of this process that are not among these pids, with all below them. What a
    dead process leaves falls to the next subreaper, and who should have ended it may have been
    stopped."""
    with contextlib.suppress(OSError):  # no descriptor to look for them: at the next look
        if left := [one for one in children_of(os.getpid()) if one.pid not in spare]:
            log.info("killing what a dead process has left: %s", [one.pid for one in left])
            kill_trees(left)


def kill_descendants(reap: bool = True, timeout_s: float = 10.0, spare: int = 0) -> list[int]:
    """SIGKILL everything below this process, but not process `spare`, until nothing is left; the
    pids that survived `timeout_s` are returned.

    Killing goes in rounds because a process may fork between the listing and the signal; as
    subreaper this process inherits what such a fork leaves. `reap` collects every dead child (a
    caller that waits itself sets it to False).
    """
    end = time.monotonic() + timeout_s
    while left := [pid for pid in _below(end) if pid != spare]:
        if time.monotonic() > end:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if reap:
            reap_children()
        time.sleep(0.002)
    return []


def _below(end: float) -> list[int]:
    """This process's descendants. While it has no descriptor to look for them, it waits, at most to
    that time."""
    while True:
        try:
            return descendants(os.getpid())
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def reap_children() -> list[tuple[int, int]]:
    """(pid, exit code as in `subprocess`) of every child that has ended and was not yet waited
    for."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))
