"""The timeline of a whole run: epochs, steps, pauses and saves, from its state, events and metrics
lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.observe.timeline import Event, Step
from orchestrator.run.state import Cause, EpochState, RunState

#: Events that announce the end of an epoch, from any process. The coordinator writes `epoch_stops`
#: whatever the reason.
NOTICED = (
    "epoch_stops",
    "node_lost",
    "coordinator_lost",
    "fault_detected",
    "notice",
    "growing",
    "worker_ended",
)


class EpochSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch, from its first message to its end. Unix seconds; None for an event that has not
    happened or was not recorded."""

    epoch: int
    began: float
    running: float | None = None
    noticed: float | None = None  # first sign of its end
    ended: float | None = None
    cause: Cause | None = None
    reason: str = ""
    outcome: str | None = None


class RunTimeline(msgspec.Struct, frozen=True):
    """The times that a run has recorded, in order."""

    created: float
    ended: float | None
    epochs: list[EpochSpan]
    steps: list[Step]
    pauses: list[tuple[float, float]] = []  # ended, resumed
    arrivals: list[float] = []  # when agents started
    #: when a save was durable, seconds that training waited for it, epoch
    saves: list[tuple[float, float, int]] = []
    reports_steps: bool = True  # False for a user's program that has reported no steps


def run_timeline(
    state: RunState,
    events: Sequence[Event],
    steps: list[Step],
) -> RunTimeline:
    """Builds the timeline of a run. `steps` has each step of each epoch once
    (`timeline.lead_steps`)."""
    events_of: dict[int, list[Event]] = {}
    for event in events:
        events_of.setdefault(event.epoch, []).append(event)
    recorded = {epoch.epoch: epoch for epoch in state.epochs}
    began = {event.epoch: event.at for event in reversed(events) if event.name == "epoch_began"}
    epochs = [
        _epoch_span(
            number,
            recorded.get(number),
            events_of.get(number, []),
            began.get(number),
        )
        for number in sorted(recorded.keys() | began.keys())
    ]
    ended = state.ended_at
    if state.is_final and ended is None:  # all processes were killed
        signs = [event.at for event in events[-1:]] + [step.at for step in steps]
        ended = max(signs, default=state.created_at)
    return RunTimeline(
        created=state.created_at,
        ended=ended,
        epochs=epochs,
        steps=steps,
        pauses=list(state.pauses),
        reports_steps=bool(steps) or "model" in state.summary or "program" not in state.summary,
        arrivals=[event.at for event in events if event.name == "agent_started"],
        saves=[
            (event.at, float(event.fields.get("stall_s") or 0.0), event.epoch)
            for event in events
            if event.name == "checkpoint_saved"
            and isinstance(event.fields.get("stall_s"), int | float)
        ],
    )


def _epoch_span(
    number: int,
    record: EpochState | None,
    events: Sequence[Event],
    began: float | None,
) -> EpochSpan:
    """One epoch, from the state's record or, without one, from the epoch's events."""
    end = _first(events, "epoch_ended", "run_ended")
    running = _first(events, "epoch_runs")
    start = record.started_at if record else began or 0.0
    signs = (event.at for event in events if _is_sign(event) and event.at >= start)
    reason = end.reason if end else ""
    if record:
        return EpochSpan(
            epoch=number,
            began=start,
            running=record.running_at,
            noticed=min(signs, default=None),
            ended=record.ended_at,
            cause=record.cause,
            reason=reason or (record.cause.text if record.cause else ""),
            outcome=record.outcome,
        )
    has_restarted = end is not None and end.again
    return EpochSpan(
        epoch=number,
        began=start,
        running=_time_of(running),
        noticed=min(signs, default=None),
        ended=_time_of(end),
        cause=_cause_in(end, number),
        reason=reason,
        outcome="restart" if has_restarted else None,
    )


def _time_of(event: Event | None) -> float | None:
    return event.at if event else None


def _is_sign(event: Event) -> bool:
    return event.name in NOTICED and not (
        event.name == "worker_ended" and (event.asked or not event.code)
    )


def _first(events: Sequence[Event], *names: str) -> Event | None:
    return next((event for event in events if event.name in names), None)


def _cause_in(end: Event | None, epoch: int) -> Cause | None:
    if end is None or end.fault is None:
        return None
    return Cause(
        kind=end.fault,
        text=end.reason,
        epoch=epoch,
        node=end.on,
        rank=end.rank,
        code=end.code,
        step=end.step,
    )
