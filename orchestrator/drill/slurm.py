"""Faults of runs on Slurm, done on the node itself by a step of the run's own job.

`srun --overlap` starts `inside` beside the agent, as the job's user: Slurm allows it to the owner of the job alone, and
it needs no door into the node. The agent's pid is in the run's state.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping

from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.job.task import environment
from orchestrator.backends.slurm.record import read_record
from orchestrator.backends.slurm.script.render import beside_agents
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest
from orchestrator.run.state import read_state

from . import inside
from .faults import KINDS
from .trial import Done

_STEP_S = 120.0  # for Slurm to start a step; a busy controller takes its time
_GONE_S = 30.0  # for it to end


class SlurmTargets:
    """The nodes of one run's job."""

    def __init__(
        self, folder: RunFolder, request: LaunchRequest, limit_s: float, environ: Mapping[str, str] | None = None
    ):
        """`limit_s`: after which a fault is taken back in any case."""
        self._folder, self._request, self._limit_s = folder, request, limit_s
        environ = os.environ if environ is None else environ
        self._slurm = Slurm({**environ, **environment(request, environ)}, timeout_s=_STEP_S)

    def check(self, fault: str) -> None:
        """OrchError (64) for what cannot be done from inside a job."""
        if fault == "partition":
            can = ", ".join(sorted(KINDS.keys() - {fault}))
            raise OrchError(f"{fault}: a node's network is not its job's to cut; what can be done: {can}", Exit.USAGE)

    def inject(self, fault: str, node: str, rank: int, for_s: float, pick: float) -> Done:
        """Do it, by a step that stays as long as there is something to take back."""
        self.check(fault)
        argv = self._command(node, fault, rank, for_s, pick)
        with tempfile.TemporaryFile() as errors:
            step = self._slurm.step(argv, errors)
            try:
                line = _first_line(step, _STEP_S + for_s)
                if not line:
                    errors.seek(0)
                    raise self._slurm.complaint("srun", errors.read().decode(errors="replace"))
                return Done(inside.heard(line), lambda: _let_go(step))
            except BaseException:
                _let_go(step)
                raise

    def _command(self, node: str, fault: str, rank: int, for_s: float, pick: float) -> list[str]:
        record = read_record(self._folder)
        if record is None:
            raise OrchError(f"run {self._folder.run_id} has no job", Exit.USAGE)
        known = read_state(self._folder).nodes.get(node)
        if known is None or known.pid is None:
            raise OrchError(f"node {node} of run {self._folder.run_id} has no agent", Exit.CAPACITY)
        flags, python = beside_agents(SlurmBackend().job_of(self._request, load_plan(self._folder.plan)))
        argv = ["srun", f"--jobid={record.job_id}", "--overlap", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
        about = (known.pid, fault, rank, for_s, pick, for_s + self._limit_s)
        return [*argv, "--unbuffered", *flags, *python, *inside.words(str(self._folder.path), *about)]


def _first_line(step: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """b"" when the step ends without one. OrchError (76) when it takes too long."""
    end, said = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(step.stdout, selectors.EVENT_READ)
        while b"\n" not in said:
            if not selector.select(max(0.0, end - time.monotonic())):
                raise OrchError(f"srun: no step within {timeout_s:g} s; look at `squeue --steps`", Exit.CAPACITY)
            chunk = os.read(step.stdout.fileno(), 4096)
            if not chunk:
                return b""
            said += chunk
    return said


def _let_go(step: subprocess.Popen[bytes]) -> None:
    """Its standard input ends: it takes its fault back, and leaves."""
    with contextlib.suppress(BrokenPipeError):
        step.stdin.close()
    try:
        step.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        step.kill()  # what is left of it on the node ends with its own limit
        step.wait()
    step.stdout.close()
