"""What the run folder keeps of a run's Slurm job, and a run's true state when file and scheduler are put together."""

from __future__ import annotations

from pathlib import Path

import msgspec

from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, from_bytes, read_request
from orchestrator.run.state import Cause, RunState, finish

from .queue import Job, id_key
from .states import explain, meaning

#: Ends of a life after which the script brings the job back, if it still may.
COMES_BACK = (int(Exit.RESTART), int(Exit.NODE), int(Exit.CAPACITY))


class SlurmRecord(Frozen):
    """backend.json: the job of the run. Written when submitting, and by the job itself at the start of each life."""

    job_id: str
    submitted_at: float
    life: int = 0  # SLURM_RESTART_COUNT: how often it has come back


def submitted_request(folder: RunFolder) -> LaunchRequest:
    """With all sizes of an elastic run, those included that this life of the job cannot hold."""
    path = kept(folder.request)
    return from_bytes(path.read_bytes()) if path.exists() else read_request(folder)


def submitted_plan(folder: RunFolder, size: int) -> Path:
    """The plan of one size as it was submitted: for nodes that nobody knew yet."""
    path = kept(folder.sized_plan(size))
    return path if path.exists() else folder.sized_plan(size)


def kept(path: Path) -> Path:
    """Where a file lies as it was submitted, once the nodes that came have changed it."""
    return path.with_suffix(f".submitted{path.suffix}")


def job_name(run_id: str) -> str:
    return f"orch-{run_id}"


def find_job(run_id: str, record: SlurmRecord | None, jobs: dict[str, Job]) -> Job | None:
    """The run's job: by its id, or by its name when it was submitted by hand and has not started yet."""
    if record is not None:
        return jobs.get(record.job_id)
    named = [job for job in jobs.values() if job.name == job_name(run_id)]
    return max(named, key=lambda job: id_key(job.id), default=None)


def verdict(state: RunState, job: Job | None, cancel_asked: bool, sent: bool = True) -> RunState:
    """The run's true state. Slurm knows whether the job lives; the run folder knows how the program fares in it.

    `sent`: a job of the run is on record. Pure. The result is never written back: it is as old as Slurm's answer.
    """
    if job is None:
        if state.is_final:
            return state
        if not sent:
            return _replace(state, reason="its script was rendered; Slurm has not seen it yet")
        text = f"Slurm does not know the job any more; it was last {state.state}"
        cause = Cause(kind="supervisor_lost", text=text, epoch=state.epoch)
        return finish(state, "failed", Exit.CAPACITY, text, cause)
    what = meaning(job.state)
    if what.over:
        return _ended(state, job, cancel_asked)
    if what.phase == "running":
        if state.is_final:  # the last life's word; this one has not spoken yet
            return _replace(state, state="restarting", exit_code=None, reason=f"job {job.id}: {what.text}")
        return (
            state
            if state.state != "pending"
            else _replace(state, state="starting", reason=f"job {job.id}: {what.text}")
        )
    why = "; ".join(
        filter(None, [what.text, explain(job.reason), f"expected to start {job.start}" if job.start else ""])
    )
    return _replace(state, state=what.phase, exit_code=None, reason=f"job {job.id}: {why}")


def unheard(state: RunState, over: bool, why: str) -> RunState:
    """The run's state while Slurm does not answer: the file's, which cannot know whether the job will come back.

    `over`: its script has said that it does not; without that a life that ended so is not the end of the run. Pure.
    """
    if not state.is_final:
        return _replace(state, reason=why)
    if over or state.state == "cancelled" or state.exit_code not in COMES_BACK:
        return state
    text = f"{why}; the last life ended {state.state} ({state.reason}), and may be followed by another"
    return _replace(state, state="restarting", exit_code=None, reason=text)


def _ended(state: RunState, job: Job, cancel_asked: bool) -> RunState:
    what = meaning(job.state)
    if cancel_asked and state.state != "done":
        reason = state.reason if state.is_final else f"job {job.id}: {what.text}"
        return finish(state, "cancelled", Exit.RESTART, reason, state.cause)
    if state.is_final and what.phase in ("done", "failed"):
        return state  # the coordinator knows more than the script's exit code
    if state.is_final and state.exit_code not in (None, int(Exit.RESTART)):
        return state
    code = what.exit if what.exit is not None else job.exit_code
    code = int(Exit.CAPACITY) if code is None or code < 0 else int(code)
    text = f"job {job.id}: {what.text}"
    if what.phase == "done":  # the script ended well, yet the coordinator did not say so
        return finish(state, "done", Exit.DONE, text, state.cause)
    cause = state.cause or Cause(kind="scheduler", text=text, epoch=state.epoch, code=job.exit_code)
    return finish(state, what.phase, code, text, cause)


_replace = msgspec.structs.replace
