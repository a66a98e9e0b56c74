"""Derives the status of a TrainRun from its run's objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct, structs

from orchestrator.backends.kubernetes.phases import ObservedRun, RunStatus, index_of, status_of
from orchestrator.backends.kubernetes.record import verdict
from orchestrator.backends.kubernetes.train_run import Bundle, Status, TrainRun, with_condition
from orchestrator.observe.timeline import StepLine
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.exits import Exit
from orchestrator.run.create import accepted
from orchestrator.run.state import Phase, RunState, finish, pending_again

from .decide import Seen


class Report(Struct, frozen=True):
    """What the run's pods last reported."""

    generation: int = -1
    state: RunState | None = None
    step: StepLine | None = None
    ettr: float | None = None


def begun(run: TrainRun) -> Status:
    """Returns the status at the start of an attempt: the first, or another one of a run that has
    ended."""
    last_status = run.status
    if last_status.attempt == run.spec.attempt and not last_status.over:
        return structs.replace(last_status, observed_generation=run.metadata.generation)
    fresh = structs.replace(
        last_status,
        attempt=run.spec.attempt,
        state="pending",
        reason="",
        exit_code=None,
        ended_at="",
        wait_until="",
        fails=0,
        observed_generation=run.metadata.generation,
    )
    last_state = run_state(last_status)
    return (
        structs.replace(fresh, run=plain(pending_again(last_state, restarts=0)))
        if last_state
        else fresh
    )


def run_state(status: Status) -> RunState | None:
    """Returns the coordinator's own state that the status holds."""
    if not status.run:
        return None
    try:
        return msgspec.convert(status.run, RunState)
    except UNREADABLE:  # written by another version
        return None


def next_status(
    seen: Seen,
    bundle: Bundle | None,
    report: Report,
    waits: str,
) -> Status:
    """Returns the current status. `waits`: why the run has no nodes, if it has none."""
    run = seen.run
    status = run.status if run.is_over else begun(run)
    coordinator_state = run_state(status)
    if report.state and report.generation >= status.generation:
        coordinator_state = report.state
    if coordinator_state is None and bundle is not None:
        coordinator_state = accepted(bundle.request, "kubernetes")
    if run.is_over:
        status = structs.replace(status, observed_generation=run.metadata.generation)
        return _counted(status, seen, report)
    state = _judged(
        seen,
        status,
        coordinator_state,
        observe(seen),
        waits,
    )
    # a living run keeps the coordinator's own state, not the one derived from it here
    stored_state = state if state.is_final else coordinator_state
    ended_generation = status.ended_generation
    if state.is_final:
        ended_generation = seen.job.generation if seen.job else status.generation
    status = structs.replace(
        status,
        **_times(status, state, seen.now),
        state=state.state,
        reason=state.reason or "",
        exit_code=state.exit_code,
        run=plain(stored_state) if stored_state and stored_state.run_id else status.run,
        ended_generation=ended_generation,
    )
    status = _counted(status, seen, report)
    return structs.replace(status, conditions=_conditions(status, seen))


def with_plan(status: Status, problem: str, now: float) -> Status:
    """Adds the condition Planned. `problem`: why the current words cannot be planned."""
    reason = "Unplannable" if problem else "Planned"
    conditions = with_condition(
        status.conditions,
        "Planned",
        holds=not problem,
        reason=reason,
        message=problem,
        now=iso(now),
    )
    return structs.replace(status, conditions=conditions)


def observe(seen: Seen) -> RunStatus | None:
    """Returns the run's status by its Job and pods; None without a Job of this start."""
    job = seen.job
    if job is None or job.generation <= seen.run.status.ended_generation:
        return None
    newest: dict[int, Any] = {}
    for pod in sorted(seen.pods, key=lambda pod: pod.metadata.creation_timestamp):
        newest[pod.index] = pod
    body = job.body()
    pods = sorted((pod.body() for pod in newest.values()), key=index_of)
    return status_of(ObservedRun(main=body, job=body, pods=pods), seen.now)


def _judged(
    seen: Seen,
    status: Status,
    coordinator_state: RunState | None,
    job_status: RunStatus | None,
    waits: str,
) -> RunState:
    run = seen.run
    allocation = seen.allocation
    state = coordinator_state or _unplanned(run, seen.now)
    living = [pod for pod in seen.pods if not pod.ended]
    alive = seen.job is not None and not seen.job.finished
    if run.spec.stopped:
        if alive or living:
            return _still(state, "stopping", "cancelled by the user: its pods save and leave")
        return finish(
            state,
            "cancelled",
            Exit.RESTART,
            "cancelled by the user",
            at=seen.now,
        )
    if job_status is not None and job_status.over:
        return _dated(verdict(state, job_status, cancel_asked=False), seen.now)
    if allocation is not None and allocation.ending:
        continues = allocation.ending.startswith(_CONTINUES)
        return _still(state, "restarting" if continues else "pending", allocation.ending)
    if job_status is None and allocation is None:
        return _still(state, "pending", waits)
    if job_status is None:
        phase: Phase = "restarting" if status.generation >= 0 else "starting"
        return _still(state, phase, "its Job is being made")
    if seen.no_quota:
        job_status = structs.replace(job_status, phase="pending", reason=seen.no_quota)
    return verdict(state, job_status, cancel_asked=False)


#: Prefixes of an allocation's `ending` whose run continues at once.
_CONTINUES = ("resize", "upgrade")


def _unplanned(run: TrainRun, now: float) -> RunState:
    return RunState(
        schema="",
        run_id="",
        state="pending",
        created_at=now,
        updated_at=now,
        writer="backend",
        backend="kubernetes",
        plan_hash="",
    )


def _still(state: RunState, phase: Phase, reason: str) -> RunState:
    return structs.replace(
        state,
        state=phase,
        reason=reason,
        exit_code=None,
        ended_at=None,
    )


def _dated(state: RunState, now: float) -> RunState:
    return structs.replace(state, ended_at=state.ended_at or now) if state.is_final else state


def _times(status: Status, state: RunState, now: float) -> dict[str, str]:
    times = {}
    if state.state == "running" and not status.started_at:
        times["started_at"] = iso(now)
    times["ended_at"] = (status.ended_at or iso(now)) if state.is_final else ""
    return times


def _counted(status: Status, seen: Seen, report: Report) -> Status:
    """Updates the counters, and the numbers of this moment."""
    running = sum(pod.running for pod in seen.pods)
    wanted_nodes = status.wanted_nodes
    if seen.allocation:
        wanted_nodes = len(seen.allocation.nodes)
    elif seen.job and not seen.job.finished:
        wanted_nodes = seen.job.spec.completions
    changes: dict[str, Any] = {
        "wanted_nodes": wanted_nodes,
        "running_nodes": running,
        "nodes": f"{running}/{wanted_nodes}" if wanted_nodes else "",
        "lost_pods": status.lost_pods + seen.lost,
    }
    if report.generation >= 0 and report.generation >= status.generation:
        if state := report.state:
            changes |= {"restarts": max(status.restarts, state.epoch), "plan_hash": state.plan_hash}
            steps = state.summary.get("steps")
            changes["steps"] = steps if isinstance(steps, int) else status.steps
        if step := report.step:
            changes |= {"step": step.step, "last_step_at": iso(step.at)}
            changes["loss"] = status.loss if step.loss is None else round(step.loss, 4)
        if report.ettr is not None:
            changes["ettr"] = round(report.ettr, 3)
    return structs.replace(status, **changes)


def _conditions(status: Status, seen: Seen) -> list[Any]:
    placed = seen.allocation is not None or (seen.queued and seen.job is not None)
    running = status.state == "running"
    missing = status.wanted_nodes - status.running_nodes
    placed_reason = "HasNodes" if placed else "NoNodes"
    placed_message = "" if placed else status.reason
    running_message = "" if running else status.reason
    degraded_reason = "NodesMissing" if missing > 0 else "Whole"
    ended_message = status.reason if status.over else ""
    state = status.state.capitalize()
    conditions = status.conditions
    for kind, holds, reason, message in (
        ("Placed", placed, placed_reason, placed_message),
        ("Running", running, state, running_message),
        ("Degraded", running and missing > 0, degraded_reason, ""),
        ("Ended", status.over, state, ended_message),
    ):
        conditions = with_condition(
            conditions,
            kind,
            holds=holds,
            reason=reason,
            message=message,
            now=iso(seen.now),
        )
    return conditions


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def plain(state: RunState) -> dict[str, Any]:
    """Returns the state as JSON values without nulls: the API server keeps no nulls, so the status
    would differ at every look."""
    document: dict[str, Any] = _without_nulls(msgspec.to_builtins(state))
    return document


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nulls(element) for element in value]
    return value
