"""Does the batch script's work when the script's node is lost.

Slurm keeps a `--no-kill` job whose batch node is lost, and the job's other nodes continue. But then
no process receives the signal before the time limit, forwards a cancel, or ends or requeues the
job. In an elastic run the agent whose node has the coordinator takes this over, once Slurm itself
has given up the script's node.
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
    """The takeover as seen from one agent.

    `script_node`: the node on which the batch script started. `job`: the job's id for Slurm's
    commands.
    """

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
        """Starts a thread that checks every few seconds while the agent runs."""
        self._thread.start()

    def run_until_job_ends(self) -> None:
        """Continues after the agent's end until the job has ended or was requeued.

        Returns at once if that is not this node's task.
        """
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            while not self._try_check():
                time.sleep(_POLL_S)

    def check(self, now: datetime) -> bool:
        """Does what is due; returns whether nothing is left to do. `now`: local time.

        OrchError when Slurm does not answer.
        """
        state = read_state(self._folder)
        script_node = state.nodes.get(self._script_node)
        if state.writer != self._node or script_node is None or script_node.state != "lost":
            return state.is_final
        output = self._slurm.run(
            [
                "scontrol",
                "--oneliner",
                "show",
                "job",
                self._job,
            ]
        )
        job = dict(field.split("=", 1) for field in output.split() if "=" in field)
        if job.get("JobState") != "RUNNING":
            return True
        # as long as Slurm has not given up that node, the script may be running
        if self._script_node in expand(job["NodeList"]):
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
        """Calls the script's own `finish`, which requeues the job or decides against it; then ends
        the job.

        Returns False if the script was killed: a requeue kills it shortly before this process.
        """
        sys.stdout.flush()
        script = str(Path(self._folder.path, "slurm", "script"))
        argv = [
            self._options.shell,
            script,
            "finish",
            str(state.exit_code or 0),
        ]
        completed = subprocess.run(
            argv,
            env=dict(self._environ),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if completed.returncode < 0:
            return False
        self._slurm.cancel(self._job, "--state=RUNNING")
        return True

    def _try_check(self) -> bool:
        try:
            return self.check(datetime.now())
        except OrchError as error:
            print(f"orch: acting for the lost batch script: {error.message}", file=sys.stderr)
            return False

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(OSError):
                self._try_check()
