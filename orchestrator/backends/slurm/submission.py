"""Submitting and tracking through submitit, with what does not hold for us replaced.

Kept: its executor (folder, hooks, job objects) and its way of watching many jobs with one call. Replaced, and why:
- the script text: ours is rendered from the plan (`render`), golden-tested, and quotes in one place;
- pickles: nothing is pickled; a job gets its request and plan as JSON from the run folder;
- the state watcher: submitit's asks sacct only, and may be 600 s old; ours asks squeue first, sacct for the rest, and
  an answer is at most two seconds old;
- waiting for a full queue: sbatch would retry for two minutes; ours gives up at once with one line.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from submitit.core.core import InfoWatcher
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from orchestrator.run.folder import write_private

from .commands import Slurm
from .queue import Job
from .states import meaning

FRESH_S = 2


class LiveWatcher(InfoWatcher):
    """States of all registered jobs, fresh, with or without accounting."""

    def __init__(self, slurm: Slurm, delay_s: int = FRESH_S) -> None:
        super().__init__(delay_s=delay_s)
        self._slurm = slurm
        self.jobs: dict[str, Job] = {}  # of every job of this user that Slurm named, registered or not

    def update(self) -> None:
        self._num_calls += 1
        self.jobs = self._slurm.jobs(sorted(self._registered))
        self._info_dict.update({id_: {"JobID": id_, "State": job.state} for id_, job in self.jobs.items()})
        self._last_status_check = time.time()
        self._finished |= {id_ for id_ in self._registered if id_ in self.jobs and meaning(self.jobs[id_].state).over}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def look(self, ids: list[str]) -> dict[str, Job]:
        """Everything known of these jobs and our others, at most `delay_s` old.

        One question serves all runs: squeue names every job of this user, so a job that the last answer held needs no
        call of its own.
        """
        fresh = time.time() - self._last_status_check < self._delay_s
        self._registered.update(ids)
        if not fresh or any(id_ not in self.jobs for id_ in ids):
            self.update()
        return self.jobs


class RunJob(SlurmJob[Any]):
    """A submitted run as submitit's job object. Its results are in the run folder, never in a pickle."""

    def __init__(self, folder: Path, job_id: str, watcher: LiveWatcher):
        self.watcher = watcher
        super().__init__(folder=folder, job_id=job_id)


class ScriptExecutor(SlurmExecutor):
    """Submits one ready script from `folder`, which is private and keeps it as `name`."""

    job_class = RunJob

    def __init__(self, folder: Path, script: str, slurm: Slurm, name: str = "job.sbatch"):
        super().__init__(folder=folder)
        self._script, self._slurm, self._name = script, slurm, name

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def write(self) -> Path:
        path = Path(self.folder) / self._name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, self._make_submission_file_text("", "").encode())
        return path

    def launch(self, watcher: LiveWatcher, *flags: str) -> RunJob:
        """OrchError with one line when Slurm refuses."""
        return self.job_class(self.folder, self._slurm.sbatch(str(self.write()), *flags), watcher)
