"""Processes of a run that somebody has stopped by a signal (state T), and that do not go on by
themselves."""

from __future__ import annotations

import time
from collections.abc import Mapping

from orchestrator.run.processes import Identity, identity, is_stopped

_CONTINUE_S = (
    20.0  # for who has stopped an agent to continue it, after its peers count it as silent
)
_LONGEST_LOOK_S = 1.0  # of the time between two looks: who looks may have been stopped as well


class StoppedAgents:
    """How long the agents of a run were seen stopped. `silence_s`: after which its peers take one
    for lost."""

    def __init__(self, silence_s: float):
        self._silence_s = silence_s
        self._stopped_s: dict[str, float] = {}
        self._looked = time.monotonic()

    def overdue(self, agents: Mapping[str, int]) -> dict[str, str]:
        """Node -> why its agent is not waited for any more. `agents`: node -> pid of those that
        live.

        The one that coordinates may be among them, and then nobody says how the run has ended.
        Where all that are left stand still, nobody waits for them.
        """
        now = time.monotonic()
        passed_s = min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        stopped = [
            node
            for node, pid in agents.items()
            if (process := identity(pid)) and is_stopped(process)
        ]
        self._stopped_s = {node: self._stopped_s.get(node, 0.0) + passed_s for node in stopped}
        limit_s = (
            self._silence_s if len(stopped) == len(agents) else 2 * self._silence_s + _CONTINUE_S
        )
        return {
            node: f"agent of {node}: stopped by a signal for {stopped_s:.0f} s, and killed"
            for node, stopped_s in self._stopped_s.items()
            if stopped_s > limit_s
        }


def stopped_process(run_id: str, processes: Mapping[str, Identity | None]) -> str | None:
    """Which of these processes of a run was stopped by a signal, and what goes on from there; None
    for none."""
    for name, process in processes.items():
        if process and is_stopped(process):
            pid = process.pid
            return (
                f"its {name} (pid {pid}) is stopped by a signal: kill -CONT {pid}, or orch cancel"
                f" {run_id}"
            )
    return None
