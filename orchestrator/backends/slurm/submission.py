"""Submits and tracks jobs through submitit: its executor, its job objects, and its watcher, which
asks once for many jobs.

These parts of submitit are replaced:
- the script's text is rendered from the plan (`script/render.py`), quoted in one place, and tested
  against golden files;
- instead of pickles, a job reads its request and plan as JSON from the run folder;
- submitit's watcher asks sacct alone and may answer 600 s late; `JobWatcher` asks squeue first and
  sacct for the rest, and is at most two seconds late;
- sbatch would retry for two minutes when the queue is full; here a full queue is refused at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import InfoWatcher
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from orchestrator.backends.base import read_record
from orchestrator.errors import OrchError
from orchestrator.run.folder import RunFolder, write_private

from .commands import Slurm
from .queue import Job
from .record import SlurmRecord, find_job, is_stale
from .script.render import JobScript, common_flags, render, render_array
from .states import job_state

MAX_AGE_S = 2


class JobWatcher(InfoWatcher):
    """Knows the states of all of the user's jobs, with or without accounting.

    `delay_s`: the maximal age of an answer.
    """

    def __init__(self, slurm: Slurm, delay_s: int = MAX_AGE_S) -> None:
        super().__init__(delay_s=delay_s)
        self._slurm = slurm
        self.jobs: dict[str, Job] = {}  # by job id: all jobs of the user that the last answer named

    def update(self) -> None:
        self._num_calls += 1
        self.jobs = self._slurm.jobs(sorted(self._registered))
        for id_, job in self.jobs.items():
            self._info_dict[id_] = {"JobID": id_, "State": job.state}
        self._last_status_check = time.time()
        for id_ in self._registered:
            registered = self.jobs.get(id_)
            if registered is not None and job_state(registered.state).ended:
                self._finished.add(id_)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def query(self, ids: list[str]) -> dict[str, Job]:
        """Job id -> job, for `ids` and all other jobs of the user, at most `delay_s` old.

        squeue lists every job of the user, so a job that is in the last answer needs no further
        call.
        """
        fresh = time.time() - self._last_status_check < self._delay_s
        self._registered.update(ids)
        if not fresh or any(id_ not in self.jobs for id_ in ids):
            self.update()
        return self.jobs

    def job_of(self, folder: RunFolder) -> Job | None:
        """The job of a run, or None if Slurm does not know it."""
        record = read_record(folder, SlurmRecord)
        ids = [record.job_id] if record else []
        job = find_job(folder.run_id, record, self.query(ids))
        if job is None or not is_stale(folder, job):
            return job
        self.clear()  # a short run may have begun and ended since the last answer
        return find_job(folder.run_id, record, self.query(ids))


class RunJob(SlurmJob[Any]):
    """A submitted run as submitit's job object, without pickles: its results are in the run
    folder."""

    def __init__(self, folder: Path, job_id: str, watcher: JobWatcher):
        # submitit declares its own watcher's class
        self.watcher = watcher  # type: ignore[assignment]
        super().__init__(folder=folder, job_id=job_id)


class ScriptExecutor(SlurmExecutor):
    """Writes one rendered script to `folder`/`name`, readable by the user alone, and submits it."""

    def __init__(
        self,
        folder: Path,
        script: str,
        slurm: Slurm,
        name: str = "job.sbatch",
    ):
        super().__init__(folder=folder)
        self._script = script
        self._slurm = slurm
        self._name = name

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def write(self) -> Path:
        path = Path(self.folder) / self._name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, self._make_submission_file_text("", "").encode())
        return path

    def launch(self, watcher: JobWatcher, *flags: str) -> RunJob:
        """Writes and submits the script. OrchError when Slurm refuses."""
        script = str(self.write())
        job_id = self._slurm.sbatch(script, *flags)
        return RunJob(self.folder, job_id, watcher)


def submit_all(jobs: Sequence[JobScript], slurm: Slurm, watcher: JobWatcher) -> list[str]:
    """Submits the runs, whose folders exist; returns their job ids.

    They are one array job if their flags agree, else one job each. When Slurm refuses one
    (OrchError), none stays in the queue.
    """
    executors = []
    for job in jobs:
        folder = Path(job.run_dir, "slurm")
        executors.append(ScriptExecutor(folder, render(job), slurm))
    for executor in executors:
        executor.write()
    if common_flags(jobs) is not None:
        array_script = render_array(jobs, jobs[0].run_id)
        slurm_folder = Path(jobs[0].run_dir, "slurm")
        array = ScriptExecutor(slurm_folder, array_script, slurm, "array.sbatch").launch(watcher)
        return [f"{array.job_id}_{index}" for index in range(len(jobs))]
    ids: list[str] = []
    try:
        for executor in executors:
            # held: none starts before Slurm has accepted the last
            ids.append(executor.launch(watcher, "--hold").job_id)
        slurm.run(["scontrol", "release", ",".join(ids)])
    except BaseException:
        for id_ in ids:
            with contextlib.suppress(OrchError):
                slurm.cancel(id_)
        raise
    return ids
