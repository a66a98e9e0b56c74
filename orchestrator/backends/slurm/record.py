"""The Slurm job's record in the run folder, and the run's state from the folder and Slurm's answer
together."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import msgspec

from orchestrator.backends.base import write_record
from orchestrator.cluster.hostlist import expand, slurm_list
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.run.bad_nodes import remembered
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import LaunchRequest, from_bytes, read_request
from orchestrator.run.state import Cause, FinalPhase, RunState, finish, read_state

from .options import read_options
from .queue import Job, id_key
from .states import NOT_LAUNCHED, explain_reason, job_state

#: Exit codes after which the script requeues the job, within its limits.
REQUEUED_EXITS = (int(Exit.RESTART), int(Exit.NODE), int(Exit.CAPACITY))


class SlurmRecord(Frozen):
    """The job of the run, as backend.json holds it.

    Submitting writes it, and so does the job itself when an attempt starts.
    """

    job_id: str
    submitted_at: float
    #: SLURM_RESTART_COUNT: how often Slurm started the job before this attempt.
    attempt: int = msgspec.field(default=0, name="life")


def record_job(folder: RunFolder, job_id: str) -> None:
    """Writes backend.json and slurm/owner: only this job may write in the folder.

    The script of any other job exits (77).
    """
    write_record(folder, SlurmRecord(job_id=job_id, submitted_at=time.time()))
    slurm = Path(folder.path, "slurm")
    slurm.mkdir(mode=0o700, exist_ok=True)
    write_private(slurm / "owner", job_id.encode() + b"\n")


def submitted_request(folder: RunFolder) -> LaunchRequest:
    """The request as submitted, with all sizes of an elastic run.

    request.json has the sizes of this attempt.
    """
    path = submitted_path(folder.request)
    return from_bytes(path.read_bytes()) if path.exists() else read_request(folder)


def submitted_plan(folder: RunFolder, size: int) -> Path:
    """Path of the plan of one size as submitted, before nodes were assigned."""
    path = submitted_path(folder.sized_plan(size))
    return path if path.exists() else folder.sized_plan(size)


def submitted_path(path: Path) -> Path:
    """Path of the submitted version of a file that node assignment has rewritten."""
    return path.with_suffix(f".submitted{path.suffix}")


def job_name(run_id: str) -> str:
    return f"orch-{run_id}"


def find_job(run_id: str, record: SlurmRecord | None, jobs: dict[str, Job]) -> Job | None:
    """The run's job, or None if Slurm does not know it.

    A script that was submitted by hand has no record, so its job is found by name.
    """
    if record is not None:
        return jobs.get(record.job_id)
    named = [job for job in jobs.values() if job.name == job_name(run_id)]
    return max(named, key=lambda job: id_key(job.id), default=None)


def exclude(folder: RunFolder, nodes: Iterable[str]) -> None:
    """Adds nodes to slurm/exclude, which the script reads on a requeue.

    The list starts from the user's own excluded nodes and those of `orch nodes`.
    """
    path = Path(folder.path, "slurm", "exclude")
    added = list(nodes)
    if not added:
        return
    excluded = [
        name
        for hosts in read_options(read_request(folder).backend_options).exclude
        for name in expand(hosts)
    ]
    excluded += remembered(folder, time.time())
    if path.exists():
        excluded += expand(path.read_text())
    names = list(dict.fromkeys([*excluded, *added]))
    write_private(path, slurm_list(names).encode() + b"\n")


def script_exit_code(folder: RunFolder) -> int | None:
    """The exit code with which the job's script ended for good, -1 if it is unknown.

    Returns None while the job may still be requeued.
    """
    try:
        content = Path(folder.path, "slurm", "over").read_text().strip()
    except OSError:
        return None
    return int(content) if content.isdigit() else -1


def last_log_error(folder: RunFolder, pattern: str = "slurm-*.log") -> str:
    """The last error in the newest log that matches `pattern`, else its last line.

    Returns "" without a log. The job's log says what failed before an agent could start: an
    interpreter, an image, a module, srun.
    """
    log_paths = [path for path in folder.logs.glob(pattern) if not path.stem.endswith("-agents")]
    for path in sorted(log_paths, key=lambda path: path.stat().st_mtime, reverse=True):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            tail = file.read().decode(errors="replace")
        lines = [
            re.sub(r"[\x00-\x1f\x7f]", " ", line).strip()
            for line in tail.split("\n")
            if line.strip()
        ]
        errors = [line for line in lines if _ERROR.search(line)]
        if lines:
            return (errors or lines)[-1][:300]
    return ""


def is_over(state: RunState, script_exit: int | None) -> bool:
    """Whether the run folder alone says that no attempt follows.

    `script_exit`: the answer of `script_exit_code`.
    """
    return state.is_final and (
        script_exit is not None
        or state.state == "cancelled"
        or state.exit_code not in REQUEUED_EXITS
    )


def is_stale(folder: RunFolder, job: Job) -> bool:
    """Whether the job is queued for another attempt although its run has ended."""
    is_queued = job_state(job.state).phase in ("pending", "starting")
    return is_queued and is_over(read_state(folder), script_exit_code(folder))


def combined_state(
    state: RunState,
    job: Job | None,
    cancel_asked: bool,
    *,
    submitted: bool = True,
    script_exit: int | None = None,
    last_line: str = "",
) -> RunState:
    """The run's state from both sources. Pure.

    Slurm knows whether the job is active; `state`, the run folder's, says how the program is doing.
    `submitted`: a job of the run is on record. `script_exit`, `last_line`: the answers of
    `script_exit_code` and `last_log_error`. The result is never written to the folder, because it
    is only as fresh as Slurm's answer.
    """
    if job is None:
        if state.is_final:
            return state
        if cancel_asked:  # while it was pending: nothing of it wrote a state
            return finish(state, "cancelled", Exit.RESTART, "cancelled by the user")
        if not submitted:
            return _replace(state, reason="its script was rendered; Slurm has not seen it yet")
        reason = f"Slurm does not know the job any more; it was last {state.state}"
        cause = Cause(kind="supervisor_lost", text=reason, epoch=state.epoch)
        return finish(state, "failed", Exit.CAPACITY, reason, cause)
    job_status = job_state(job.state)
    if job_status.ended:
        return _state_of_ended_job(state, job, cancel_asked, script_exit, last_line)
    over = is_over(state, script_exit)
    if over and job_status.phase in ("pending", "starting"):
        # Slurm requeues some jobs whose run has ended (docs/slurm.md); that attempt leaves at once
        return state
    if job_status.phase == "running":
        if over:
            reason = f"{state.reason or state.state}; job {job.id} is about to end"
            return _replace(
                state,
                state="stopping",
                exit_code=None,
                reason=reason,
            )
        if state.is_final:  # of the previous attempt; this one has not written its state yet
            return _replace(
                state,
                state="restarting",
                exit_code=None,
                reason=f"job {job.id}: {job_status.phrase}",
            )
        if state.state != "pending":
            return state
        return _replace(state, state="starting", reason=f"job {job.id}: {job_status.phrase}")
    start = f"expected to start {job.start}" if job.start and job_status.phase == "pending" else ""
    phrases = [job_status.phrase, explain_reason(job.reason), start]
    return _replace(
        state,
        state=job_status.phase,
        exit_code=None,
        reason=f"job {job.id}: {'; '.join(filter(None, phrases))}",
    )


def state_without_slurm(state: RunState, no_requeue: bool, error: str) -> RunState:
    """The run's state while Slurm does not answer, from the run folder's `state` alone. Pure.

    `no_requeue`: the job's script has decided that no attempt follows. Otherwise an attempt that
    ended with an exit code in REQUEUED_EXITS may not be the end of the run, which then is
    `restarting`. `error`: Slurm's error.
    """
    if not state.is_final:
        return _replace(state, reason=error)
    if no_requeue or state.state == "cancelled" or state.exit_code not in REQUEUED_EXITS:
        return state
    reason = (
        f"{error}; the last attempt ended {state.state} ({state.reason}), and may be followed by"
        " another"
    )
    return _replace(
        state,
        state="restarting",
        exit_code=None,
        reason=reason,
    )


def _state_of_ended_job(
    state: RunState,
    job: Job,
    cancel_asked: bool,
    script_exit: int | None,
    last_line: str,
) -> RunState:
    job_status = job_state(job.state)
    if cancel_asked and state.state != "done":
        reason = (state.is_final and state.reason) or f"job {job.id}: {job_status.phrase}"
        return finish(state, "cancelled", Exit.RESTART, reason, state.cause)
    if state.is_final and job_status.phase in ("done", "failed"):
        return state  # the coordinator wrote it, and knows more than the script's exit code
    if state.is_final and state.exit_code not in (None, int(Exit.RESTART)):
        return state
    code = job_status.exit if job_status.exit is not None else job.exit_code
    if job.reason.startswith(NOT_LAUNCHED):
        code = Exit.NODE
    elif code is None or code < 0:
        # squeue does not report exit codes; where accounting is missing, the script may have one
        code = script_exit if script_exit is not None and script_exit >= 0 else Exit.CAPACITY
    code = int(code)
    run_reason = state.reason if state.is_final else ""  # the run knows more of its end than Slurm
    phrases = [
        run_reason,
        f"job {job.id}: {job_status.phrase}",
        explain_reason(job.reason),
        last_line,
    ]
    full_reason = "; ".join(filter(None, phrases))
    if job_status.phase == "done":  # the script succeeded without a final state of the coordinator
        return finish(state, "done", Exit.DONE, full_reason, state.cause)
    cause = state.cause or Cause(
        kind="scheduler",
        text=full_reason,
        epoch=state.epoch,
        code=job.exit_code,
    )
    return finish(
        state,
        cast("FinalPhase", job_status.phase),
        code,
        full_reason,
        cause,
    )


_ERROR = re.compile(
    r"error|orch:|not found|no such file|cannot|denied|unable|invalid|refused", re.I
)
_replace = msgspec.structs.replace
