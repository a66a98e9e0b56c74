"""The status of a TrainRun from what is seen of its run. Pure."""

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
    """What the run's pods have last said of it."""

    generation: int = -1
    state: RunState | None = None
    step: StepLine | None = None
    ettr: float | None = None


def begun(run: TrainRun) -> Status:
    """The status when an attempt begins: the first, or one more of a run that has ended."""
    before = run.status
    if before.attempt == run.spec.attempt and not before.over:
        return structs.replace(before, observed_generation=run.metadata.generation)
    fresh = structs.replace(
        before,
        attempt=run.spec.attempt,
        state="pending",
        reason="",
        exit_code=None,
        ended_at="",
        wait_until="",
        fails=0,
        observed_generation=run.metadata.generation,
    )
    known = run_state(before)
    return structs.replace(fresh, run=plain(pending_again(known, restarts=0))) if known else fresh


def run_state(status: Status) -> RunState | None:
    """The coordinator's own account that the status holds."""
    if not status.run:
        return None
    try:
        return msgspec.convert(status.run, RunState)
    except UNREADABLE:  # of another version
        return None


def next_status(seen: Seen, bundle: Bundle | None, report: Report, waits: str) -> Status:
    """The status now. `waits`: why it has no nodes, where it has none."""
    run = seen.run
    status = run.status if run.is_over else begun(run)
    known = (
        report.state
        if report.state and report.generation >= status.generation
        else run_state(status)
    )
    if known is None and bundle is not None:
        known = accepted(bundle.request, "kubernetes")
    what = observe(seen)
    if run.is_over:
        return structs.replace(
            _counted(status, seen, what, report), observed_generation=run.metadata.generation
        )
    found = _judged(seen, status, known, what, waits)
    status = structs.replace(
        status, **_times(status, found, seen.now), state=found.state, reason=found.reason or ""
    )
    kept = (
        found if found.is_final else known
    )  # what the coordinator said, not what is made of it here
    status = structs.replace(
        status, exit_code=found.exit_code, run=plain(kept) if kept and kept.run_id else status.run
    )
    if found.is_final:
        status = structs.replace(
            status, ended_generation=seen.job.generation if seen.job else status.generation
        )
    status = _counted(status, seen, what, report)
    return structs.replace(status, conditions=_conditions(status, seen))


def with_plan(status: Status, problem: str, now: float) -> Status:
    """`problem`: why the words as they are now cannot be planned."""
    reason = "Unplannable" if problem else "Planned"
    return structs.replace(
        status,
        conditions=with_condition(
            status.conditions, "Planned", not problem, reason, problem, iso(now)
        ),
    )


def observe(seen: Seen) -> RunStatus | None:
    """What the Job and its pods come to; None without a Job of this start."""
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
    seen: Seen, status: Status, known: RunState | None, what: RunStatus | None, waits: str
) -> RunState:
    run = seen.run
    given = seen.allocation
    state = known or _unplanned(run, seen.now)
    living = [pod for pod in seen.pods if not pod.ended]
    alive = seen.job is not None and not seen.job.finished
    if run.spec.stopped:
        if alive or living:
            return _still(state, "stopping", "cancelled by the user: its pods save and leave")
        return finish(state, "cancelled", Exit.RESTART, "cancelled by the user", at=seen.now)
    if what is not None and what.over:
        return _dated(verdict(state, what, cancel_asked=False), seen.now)
    if given is not None and given.ending:
        return _still(
            state, "restarting" if given.ending.startswith(_GOES_ON) else "pending", given.ending
        )
    if what is None:
        again: Phase = "restarting" if status.generation >= 0 else "starting"
        return _still(
            state,
            "pending" if given is None else again,
            waits if given is None else "its Job is being made",
        )
    if seen.no_quota:
        what = structs.replace(what, phase="pending", reason=seen.no_quota)
    return verdict(state, what, cancel_asked=False)


#: Beginnings of why an allocation ends while its run goes straight on.
_GOES_ON = ("resize", "upgrade")


def _unplanned(run: TrainRun, now: float) -> RunState:
    return RunState(
        schema="", run_id="", state="pending", created_at=now, updated_at=now, writer="backend",
        backend="kubernetes", plan_hash="",
    )  # fmt: skip


def _still(state: RunState, phase: Phase, reason: str) -> RunState:
    return structs.replace(state, state=phase, reason=reason, exit_code=None, ended_at=None)


def _dated(state: RunState, now: float) -> RunState:
    return structs.replace(state, ended_at=state.ended_at or now) if state.is_final else state


def _times(status: Status, found: RunState, now: float) -> dict[str, str]:
    times = {}
    if found.state == "running" and not status.started_at:
        times["started_at"] = iso(now)
    times["ended_at"] = (status.ended_at or iso(now)) if found.is_final else ""
    return times


def _counted(status: Status, seen: Seen, what: RunStatus | None, report: Report) -> Status:
    """Numbers that only grow, and those of this moment."""
    given = seen.allocation
    job = seen.job
    changes: dict[str, Any] = {}
    running = sum(pod.running for pod in seen.pods)
    wanted = (
        len(given.nodes)
        if given
        else job.spec.completions
        if job and not job.finished
        else status.wanted_nodes
    )
    changes |= {
        "wanted_nodes": wanted,
        "running_nodes": running,
        "nodes": f"{running}/{wanted}" if wanted else "",
    }
    changes["lost_pods"] = status.lost_pods + seen.lost
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
    found = status.conditions
    for kind, holds, reason, message in (
        ("Placed", placed, "HasNodes" if placed else "NoNodes", "" if placed else status.reason),
        ("Running", running, status.state.capitalize(), status.reason if not running else ""),
        ("Degraded", running and missing > 0, "NodesMissing" if missing > 0 else "Whole", ""),
        ("Ended", status.over, status.state.capitalize(), status.reason if status.over else ""),
    ):
        found = with_condition(found, kind, holds, reason, message, iso(seen.now))
    return found


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def plain(state: RunState) -> dict[str, Any]:
    """As JSON, without what is null: the API server keeps no nulls, and the status would differ at
    every look."""
    found: dict[str, Any] = _without_nulls(msgspec.to_builtins(state))
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nulls(one) for one in value]
    return value
