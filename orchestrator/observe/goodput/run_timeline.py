"""The time line of a whole run: epochs, steps, pauses and saves, from its state, events and metrics
lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from orchestrator.observe.timeline import Event, Step
from orchestrator.run.state import Cause, RunState

#: Events that say that an epoch is over, whoever saw it first. `epoch_stops` is the coordinator's,
#: for every reason.
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
    """One epoch: from its first message to its end. Unix seconds; None: not yet, or nobody could
    write it down."""

    epoch: int
    began: float
    running: float | None = None
    noticed: float | None = None  # first sign that it is over
    ended: float | None = None
    cause: Cause | None = None
    reason: str = ""
    outcome: str | None = None


class RunTimeline(msgspec.Struct, frozen=True):
    """All that a run has left about its time, in order."""

    created: float
    ended: float | None
    epochs: list[EpochSpan]
    steps: list[Step]
    pauses: list[tuple[float, float]] = []  # ended, resumed
    arrivals: list[float] = []  # agents start
    saves: list[
        tuple[float, float, int]
    ] = []  # durable at, seconds that training waited for it, epoch
    reports_steps: bool = True  # False: a user's program that has told nothing of its steps


def run_timeline(state: RunState, events: Sequence[Event], steps: list[Step]) -> RunTimeline:
    """The run's time line. `steps`: each step of each epoch once (`timeline.lead_steps`)."""
    by_epoch: dict[int, list[Event]] = {}
    for event in events:
        by_epoch.setdefault(event.epoch, []).append(event)
    known = {epoch.epoch: epoch for epoch in state.epochs}
    began = {event.epoch: event.at for event in reversed(events) if event.name == "epoch_began"}
    epochs = []
    for number in sorted(known.keys() | began.keys()):
        book = known.get(number)
        said = by_epoch.get(number, [])
        start = book.started_at if book else began[number]
        end = _first(said, "epoch_ended", "run_ended")
        running = _first(said, "epoch_runs")
        again = "restart" if end and end.again else None
        epochs.append(
            EpochSpan(
                epoch=number,
                began=start,
                running=book.running_at if book else running.at if running else None,
                noticed=min(
                    (event.at for event in said if _is_sign(event) and event.at >= start),
                    default=None,
                ),
                ended=book.ended_at if book else end.at if end else None,
                cause=book.cause if book else _cause_in(end, number),
                reason=(end.reason if end else "")
                or (book.cause.text if book and book.cause else ""),
                outcome=book.outcome if book else again,
            )
        )
    last_sign = max(
        [event.at for event in events[-1:]] + [step.at for step in steps], default=state.created_at
    )
    return RunTimeline(
        created=state.created_at,
        ended=last_sign
        if state.is_final and state.ended_at is None
        else state.ended_at,  # all were killed
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
