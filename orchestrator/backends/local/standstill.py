"""Processes of a run that somebody has stopped by a signal (state T), and that need a signal to
continue."""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.run.processes import Identity, identity, is_stopped

#: Time to continue a stopped agent by hand after its peers count it as silent.
_CONTINUE_S = 20.0
#: The most that counts of the time between two checks: the supervisor itself may have been stopped.
_LONGEST_CHECK_S = 1.0


class StoppedAgents:
    """Measures how long agents of a run have been stopped.

    `silence_s`: seconds of silence after which its peers take an agent for lost.
    """

    def __init__(self, silence_s: float):
        self._silence_s = silence_s
        self._stopped_s: dict[str, float] = {}
        self._checked_at = time.monotonic()

    def overdue(self, agents: Mapping[str, int]) -> dict[str, str]:
        """Node -> the reason to kill its agent, for agents that were stopped for too long.

        `agents`: node -> pid of every live agent. The coordinator may be among the stopped ones,
        and then no process records how the run ended. If all live agents are stopped, the limit is
        shorter, because no peer is waiting for them.
        """
        now = time.monotonic()
        passed_s = min(now - self._checked_at, _LONGEST_CHECK_S)
        self._checked_at = now
        stopped = [
            node
            for node, pid in agents.items()
            if (process := identity(pid)) and is_stopped(process)
        ]
        self._stopped_s = {node: self._stopped_s.get(node, 0.0) + passed_s for node in stopped}
        limit_s = self._silence_s
        if len(stopped) < len(agents):
            limit_s = 2 * self._silence_s + _CONTINUE_S
        return {
            node: f"agent of {node}: stopped by a signal for {stopped_s:.0f} s, and killed"
            for node, stopped_s in self._stopped_s.items()
            if stopped_s > limit_s
        }


def stopped_process(run_id: str, processes: Mapping[str, Identity | None]) -> str | None:
    """A message about the first of these processes that is stopped, with the remedy, or None."""
    for name, process in processes.items():
        if process and is_stopped(process):
            pid = process.pid
            return (
                f"its {name} (pid {pid}) is stopped by a signal: kill -CONT {pid}, or orch cancel"
                f" {run_id}"
            )
    return None
