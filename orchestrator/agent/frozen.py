"""Workers that are stopped (SIGSTOP, a debugger that let go, a shell's Ctrl-Z): alive, silent, and their peers wait.

Nothing but the kernel's word for the process tells them from slow ones, and the agent is on the same machine to ask.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.launch.processes import Identity, identity, is_stopped

LOOKS = 3  # in a row, a heartbeat apart: a stop and continue by whoever looks into a process is none


class FrozenWatch:
    def __init__(self) -> None:
        self._seen: dict[Identity, int] = {}  # stopped process -> looks in a row

    def look(self, pids: Mapping[int, int]) -> list[tuple[int, Identity]]:
        """Of the workers `rank -> pid`, those that have just been found stopped for the last time, with their rank."""
        stopped = {found: rank for rank, pid in pids.items() if (found := identity(pid)) and is_stopped(found)}
        self._seen = {process: self._seen.get(process, 0) + 1 for process in stopped}
        return [(rank, process) for process, rank in stopped.items() if self._seen[process] == LOOKS]
