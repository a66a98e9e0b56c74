"""Does the batch script's work when the script's node is lost.

Slurm keeps a `--no-kill` job whose batch node is lost, and its other nodes go on. But then no
process receives the notice before the time limit, forwards a cancel, or ends or requeues the job.
In an elastic run the agent whose node has the coordinator takes this over, once Slurm itself has
given up the script's node.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.cluster.hostlist import expand
from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import wants_end
from orchestrator.run.state import RunState, read_state

from .agent_supervisor import FORWARDED_SIGNAL

_POLL_S = 5.0


class BatchStepTakeover:
    """One agent's part in it. `script_node`: where the batch script started. `job`: its id for
    Slurm's commands."""

    def __init__(
        self,
        folder: RunFolder,
        node: str,
        script_node: str,
        job: str,
        options: SlurmOptions,
        environ: Mapping[str, str],
    ):
        self._folder = folder
        self._node = node
        self._script_node = script_node
        self._job = job
        self._options = options
        self._environ = environ
        self._slurm = Slurm(environ)
        self._signalled = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def start(self) -> None:
        """Check every few seconds, in a thread, while the agent runs."""
        self._thread.start()

    def run_until_job_ends(self) -> None:
        """After the agent's end: returns once the job is ended or requeued, at once if that is not
        this node's task."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            while not self._try_check():
                time.sleep(_POLL_S)

    def check(self, now: datetime) -> bool:
        """Do what is due; returns whether that was all. `now`: local time. OrchError when Slurm
        does not answer."""
        state = read_state(self._folder)
        script_node = state.nodes.get(self._script_node)
        if state.writer != self._node or script_node is None or script_node.state != "lost":
            return state.is_final
        output = self._slurm.run(["scontrol", "--oneliner", "show", "job", self._job])
        job = dict(field.split("=", 1) for field in output.split() if "=" in field)
        if job.get("JobState") != "RUNNING":
            return True
        if self._script_node in expand(
            job["NodeList"]
        ):  # not given up by Slurm: the script may be running
            return False
        if state.is_final:
            return self._finish(state)
        if not self._signalled and (
            wants_end(self._folder) or self._time_limit_is_near(job.get("EndTime", ""), now)
        ):
            self._signalled = True
            self._slurm.cancel(self._job, f"--signal={FORWARDED_SIGNAL.name.removeprefix('SIG')}")
        return False

    def _time_limit_is_near(self, end: str, now: datetime) -> bool:
        try:
            return now >= datetime.fromisoformat(end) - timedelta(seconds=self._options.notice_s)
        except ValueError:  # Unknown
            return False

    def _finish(self, state: RunState) -> bool:
        """Call the script's own `finish`, which requeues the job or decides against it, and then
        end the job.

        Returns whether that is done: False if the script was killed, because a requeue kills it
        shortly before us.
        """
        sys.stdout.flush()
        script = str(Path(self._folder.path, "slurm", "script"))
        argv = [self._options.shell, script, "finish", str(state.exit_code or 0)]
        completed = subprocess.run(
            argv, env=dict(self._environ), stdin=subprocess.DEVNULL, check=False
        )
        if completed.returncode < 0:
            return False
        self._slurm.cancel(self._job, "--state=RUNNING")
        return True

    def _try_check(self) -> bool:
        try:
            return self.check(datetime.now())
        except OrchError as error:
            print(f"orch: in place of the script: {error.message}", file=sys.stderr)
            return False

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(OSError):
                self._try_check()
