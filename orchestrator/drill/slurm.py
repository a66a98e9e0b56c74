"""Faults of runs on Slurm: signals to the agent of one node, sent from inside the run's own job.

`srun --overlap` starts a step beside the agents', on that node, as the job's user: Slurm allows it to the owner of the
job alone, and it needs no door into the node. What it can reach is the agent, whose pid is in the run's state.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

from orchestrator.errors import OrchError
from orchestrator.launch.run_folder import RunFolder
from orchestrator.launch.state import read_state
from orchestrator.plan.exits import Exit
from orchestrator.slurm.commands import Slurm
from orchestrator.slurm.record import read_record

ALLOWED = ("kill_agent", "stop_agent", "notice")
_STEP_S = 60.0  # for Slurm to start a step; a busy controller takes its time


class SlurmTargets:
    """The agents of one run's job."""

    def __init__(self, folder: RunFolder, environ: Mapping[str, str] | None = None):
        self._folder = folder
        self._slurm = Slurm(os.environ if environ is None else environ, timeout_s=_STEP_S)

    def check(self, fault: str) -> None:
        """OrchError (64) for what cannot be done from inside a job."""
        if fault not in ALLOWED:
            raise OrchError(f"{fault} cannot be done in a Slurm job; what can: {', '.join(ALLOWED)}", Exit.USAGE)

    def inject(self, fault: str, node: str, rank: int, for_s: float, pick: float) -> Callable[[], None]:
        """Do it; what takes it back."""
        self.check(fault)
        first, later = {"kill_agent": ("KILL", ""), "stop_agent": ("STOP", "CONT"), "notice": ("TERM", "KILL")}[fault]
        argv = self._command(node)
        pid = self._pid(node)
        self._slurm.run([*argv, f"-{first}", str(pid)])

        def take_back() -> None:
            if later and self._pid(node) == pid:  # else another agent has come meanwhile
                with contextlib.suppress(OrchError):  # it has left, as it was told
                    self._slurm.run([*argv, f"-{later}", str(pid)])

        return take_back

    def _command(self, node: str) -> list[str]:
        record = read_record(self._folder)
        if record is None:
            raise OrchError(f"run {self._folder.run_id} has no job", Exit.USAGE)
        return [
            "srun",
            f"--jobid={record.job_id}",
            "--overlap",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            "kill",
        ]

    def _pid(self, node: str) -> int:
        known = read_state(self._folder).nodes.get(node)
        if known is None or known.pid is None:
            raise OrchError(f"node {node} of run {self._folder.run_id} has no agent", Exit.CAPACITY)
        return known.pid
