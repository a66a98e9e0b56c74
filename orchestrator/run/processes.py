"""Processes of this machine: their identity, their descendants, and how to end a whole tree. Linux.

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
from typing import NamedTuple

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
    """Makes orphans below this process its children from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Sends `signum` to the calling process when `parent` dies; call it in the child, between
    fork and exec."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # the parent died before the line above
        os.kill(os.getpid(), signum)


def name_process(name: str) -> None:
    """Sets the name that `ps -o comm` and `top` show for this process, 15 bytes at most."""
    with open("/proc/self/comm", "w") as file:
        file.write(name[:15])


class Identity(Struct, frozen=True):
    """Identifies a process even after its number is reused: the kernel's start time (clock ticks
    since boot) goes with the pid."""

    pid: int
    started: int


class _Status(NamedTuple):
    """The fields of /proc/<pid>/stat that are used here."""

    parent: int
    state: str
    started: int  # clock ticks since boot
    cpu_ticks: int


def _read_status(pid: int) -> _Status | None:
    """Returns None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name in parentheses may hold anything
            fields = file.read().rpartition(b")")[2].split()
        return _Status(
            parent=int(fields[1]),
            state=fields[0].decode(),
            started=int(fields[19]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
        )
    except (OSError, IndexError):
        return None


class Load(Struct, frozen=True):
    """The state and the computing time of a process, as the kernel reports them."""

    #: R running, S sleeping, D in a system call that cannot be interrupted, T stopped, Z dead
    state: str
    cpu_s: float  # computing time of all its threads, since it began


def load_of(process: Identity) -> Load | None:
    """Returns the load of a process, None if it is gone."""
    status = _read_status(process.pid)
    if status is None or status.started != process.started:
        return None
    return Load(status.state, status.cpu_ticks / os.sysconf("SC_CLK_TCK"))


def identity(pid: int) -> Identity | None:
    """Returns the identity of the process that has this pid now, None if there is none."""
    status = _read_status(pid)
    return Identity(pid, status.started) if status else None


def is_alive(process: Identity) -> bool:
    """Tells whether the process runs: it is not gone, not a zombie, and not another process with
    the same number."""
    status = _read_status(process.pid)
    if status is None or status.started != process.started:
        return False
    return status.state not in "ZX"


def is_stopped(process: Identity) -> bool:
    """Tells whether the process was stopped by a signal; a process that a debugger holds is not."""
    status = _read_status(process.pid)
    if status is None or status.started != process.started:
        return False
    return status.state == "T"


class StoppedProcessGuard:
    """Continues a process that was stopped by a signal, and kills it if it keeps being stopped.

    `look` is called regularly. A process that is stopped at `after` calls in a row is continued,
    and killed at four times as many.
    """

    def __init__(self, after: int):
        self._after = after
        self._looks = 0
        self._process = Identity(0, 0)

    def look(self, pid: int) -> str:
        """Checks the process that has this pid. Returns "continued", "killed", or "" if nothing
        was done."""
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
    """Sends a signal to exactly that process; False if it is gone. A pidfd pins the number
    between check and signal."""
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
    """Maps each parent to its children, zombies left out."""
    families: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        status = _read_status(int(name)) if name.isdigit() else None
        if status and status.state not in "ZX":
            families.setdefault(status.parent, []).append(int(name))
    return families


def children_of(parent: int) -> list[Identity]:
    """Returns the children of a process, zombies left out."""
    return [child for pid in _families().get(parent, []) if (child := identity(pid))]


def descendants(root: int) -> list[int]:
    """Returns the pids below `root`, zombies left out, parents before children."""
    families = _families()
    pids = []
    queue = [root]
    while queue:
        children = families.get(queue.pop(), [])
        pids += children
        queue += children
    return pids


def holders(path: Path) -> list[Identity]:
    """Returns the processes that have the file open, if this user may inspect them; not this
    process."""
    try:
        file = os.stat(path)
    except OSError:
        return []
    processes = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process of another user, or gone by now
            process = identity(int(name))
            for fd in os.listdir(f"/proc/{name}/fd"):
                if os.path.samestat(os.stat(f"/proc/{name}/fd/{fd}"), file) and process:
                    processes.append(process)
                    break
    return processes


def kill_trees(roots: Sequence[Identity]) -> None:
    """Kills these processes and all below them. All are stopped first, so none can start others
    in between."""
    pids = [pid for root in roots if is_alive(root) for pid in descendants(root.pid)]
    processes = [*roots, *filter(None, map(identity, pids))]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(OSError):
                send_signal(process, signum)


def kill_other_children(spare: Collection[int]) -> None:
    """Kills the children of this process whose pids are not in `spare`, with all below them. The
    children of a dead process fall to the next subreaper, and the process that should have ended
    them may have been stopped."""
    with contextlib.suppress(OSError):  # without a free descriptor: the next call finds them
        if orphans := [child for child in children_of(os.getpid()) if child.pid not in spare]:
            log.info("killing the orphans of a dead process: %s", [child.pid for child in orphans])
            kill_trees(orphans)


def kill_descendants(
    reap: bool = True,
    timeout_s: float = 10.0,
    spare: int = 0,
) -> list[int]:
    """Kills everything below this process, but not process `spare`, until nothing is left; returns
    the pids that survived `timeout_s`.

    Killing goes in rounds because a process may fork between the listing and the signal; as
    subreaper this process inherits the children of such a fork. `reap` collects every dead child
    (a caller that waits itself sets it to False).
    """
    deadline = time.monotonic() + timeout_s
    while survivors := [pid for pid in _own_descendants(deadline) if pid != spare]:
        if time.monotonic() > deadline:
            return survivors
        for pid in survivors:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        if reap:
            reap_children()
        time.sleep(0.002)
    return []


def _own_descendants(deadline: float) -> list[int]:
    """Returns this process's descendants. While it has no free descriptor to list them, it waits,
    at most until the deadline."""
    while True:
        try:
            return descendants(os.getpid())
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def reap_children() -> list[tuple[int, int]]:
    """Waits for every child that has ended, and returns its pid and its exit code as in
    `subprocess`."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))
