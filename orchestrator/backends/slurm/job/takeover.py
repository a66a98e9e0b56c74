"""In place of a job's script whose node was lost.

Slurm keeps a `--no-kill` job that loses the node of its batch script, and lets its other nodes work on. But then nobody
hears the notice before the time limit, passes a cancel on, or ends the job. So an agent of an elastic run does it: the
one whose node has the coordinator, and only when Slurm itself has given the script's node up.
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
from orchestrator.run.state import RunState, read_state

_EVERY_S = 5.0


class StandIn:
    """One agent's part in it. `job`: by which Slurm's commands know the job; `script_node`: where its script began."""

    def __init__(
        self,
        folder: RunFolder,
        node: str,
        script_node: str,
        job: str,
        options: SlurmOptions,
        environ: Mapping[str, str],
    ):
        self._folder, self._node, self._script_node, self._job = folder, node, script_node, job
        self._options, self._environ, self._slurm = options, environ, Slurm(environ)
        self._told = False
        self._stop = threading.Event()
        self._watch = threading.Thread(target=self._look_again_and_again, daemon=True)

    def start(self) -> None:
        """Look now and then while the agent works."""
        self._watch.start()

    def until_over(self) -> None:
        """After the agent: see the job ended or requeued, where that falls to us; at once where it does not."""
        self._stop.set()
        self._watch.join()
        with contextlib.suppress(OSError):
            while not self._looked():
                time.sleep(_EVERY_S)

    def look(self, now: datetime) -> bool:
        """One look; True when nothing is left to do. OrchError when Slurm does not answer."""
        state = read_state(self._folder)
        lost = state.nodes.get(self._script_node)
        if state.writer != self._node or lost is None or lost.state != "lost":
            return state.is_final
        shown = self._slurm.run(["scontrol", "--oneliner", "show", "job", self._job])
        job = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        if job.get("JobState") != "RUNNING":
            return True
        if self._script_node in expand(job["NodeList"]):  # Slurm has not noticed yet; or the script lives, and will act
            return False
        if state.is_final:
            return self._finish(state)
        if not self._told and (self._folder.cancel.exists() or self._notice_is_due(job.get("EndTime", ""), now)):
            self._told = True
            self._slurm.cancel(self._job, "--signal=TERM")
        return False

    def _notice_is_due(self, end: str, now: datetime) -> bool:
        try:
            return now >= datetime.fromisoformat(end) - timedelta(seconds=self._options.notice_s)
        except ValueError:  # Unknown
            return False

    def _finish(self, state: RunState) -> bool:
        """By the script's own rules: requeued where it may come back, and where not, ended. Whether that is done.

        A script that is killed went with the life that it has ended, a moment before us: the next look would tell.
        """
        sys.stdout.flush()
        script = str(Path(self._folder.path, "slurm", "script"))
        argv = [self._options.shell, script, "finish", str(state.exit_code or 0)]
        done = subprocess.run(argv, env=dict(self._environ), stdin=subprocess.DEVNULL, check=False)
        if done.returncode < 0:
            return False
        self._slurm.cancel(self._job, "--state=RUNNING")
        return True

    def _looked(self) -> bool:
        try:
            return self.look(datetime.now())
        except OrchError as error:
            print(f"orch: in place of the script: {error.message}", file=sys.stderr)
            return False

    def _look_again_and_again(self) -> None:
        while not self._stop.wait(_EVERY_S):
            with contextlib.suppress(OSError):
                self._looked()
