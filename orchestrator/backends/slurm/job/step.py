"""Runs a command on one node of a run, next to the agent, as a further step of the run's job.

`srun --overlap` starts the step as the job's user: Slurm allows that to the owner of the job alone,
and no other way into the node is needed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_END_S = 30.0  # time for the step to end


class JobStep:
    """A running step, which ends by itself or when `close` closes its standard input."""

    def __init__(self, slurm: Slurm, job_id: str, node: str, argv: Sequence[str]):
        self._slurm = slurm
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the step
        step_flags = [
            f"--jobid={job_id}",
            "--overlap",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            "--unbuffered",
        ]
        self._process = slurm.start(["srun", *step_flags, *argv], self._errors)
        assert self._process.stdin and self._process.stdout
        self._input = self._process.stdin
        self._output = self._process.stdout

    def line(self, timeout_s: float) -> bytes:
        """The first line of the command's output, b"" when it ends without one.

        OrchError (76) when there is no line within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while b"\n" not in received:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise OrchError(
                        f"srun: no step within {timeout_s:g} s; look at `squeue --steps`",
                        Exit.CAPACITY,
                    )
                chunk = os.read(self._output.fileno(), 4096)
                if not chunk:
                    return b""
                received += chunk
        return received

    def failure(self) -> OrchError:
        """The error with which the step ended before it printed a line: what srun wrote."""
        self._errors.seek(0)
        return self._slurm.to_error("srun", self._errors.read().decode(errors="replace"))

    def close(self) -> None:
        """Closes the command's standard input and waits for its end. May be called twice."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # what is left of it on the node ends by itself
            self._process.wait()
        self._output.close()
        self._errors.close()
