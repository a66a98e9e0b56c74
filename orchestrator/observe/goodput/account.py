"""Counts a run's time by state, and the cost of its faults, from its timeline. Pure.

docs/reliability.md defines where each state begins and ends. The times of each node come from its
own clock: a skew moves the border between two states, but no second is counted twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import msgspec

from orchestrator.observe.timeline import Step

from .intervals import Interval, WallState, partition, totals
from .run_timeline import EpochSpan, RunTimeline

#: A step that takes longer than HANG_FACTOR usual steps plus HANG_S seconds is a hang. All of its
#: time beyond one usual step counts as hung.
HANG_FACTOR = 5.0
HANG_S = 1.0
_ENOUGH = 3  # steps of an epoch from which its usual step is known


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that ended before the run did. Seconds; None for an event that has not happened or
    was not recorded."""

    epoch: int
    at: float  # Unix seconds of the last step before it, or of the start of an epoch without steps
    planned: bool  # nodes joined or left after all ranks had saved
    kind: str
    text: str
    node: str | None = None
    rank: int | None = None
    code: int | None = None
    noticed_s: float | None = None  # from the last step to the first sign of the fault
    back_s: float | None = None  # from the first sign to the beginning of the next step
    lost_steps: int | None = None  # steps that were recomputed
    lost_s: float = 0.0  # time until the next fault that was neither productive nor a save


class Account(msgspec.Struct, frozen=True):
    wall_s: float
    #: seconds by state, which sum to wall_s; empty for a program that reports no steps
    seconds: dict[WallState, float]
    ettr: float | None  # productive / wall
    intervals: list[Interval]
    faults: list[Fault]


def account(run: RunTimeline, now: float) -> Account:
    """Counts the time of a run by state, and the cost of its faults.

    `now` cuts off a run that has not ended. The time of a program that reports no steps cannot be
    classified: its account has faults, but neither ETTR nor seconds by state.
    """
    end = run.ended if run.ended is not None else max(now, run.created)
    steps = _by_epoch(run.steps)
    epoch_ends = _ends(run, steps)
    intervals = partition(
        run.created,
        end,
        moments=_moments(run, steps, epoch_ends),
        pieces=_pieces(run, steps, epoch_ends, end),
    )
    seconds = totals(intervals)
    wall = end - run.created
    if not run.reports_steps:
        return Account(
            wall,
            {},
            None,
            [],
            _faults(run, steps, epoch_ends, []),
        )
    ettr = seconds["productive"] / wall if wall > 0 else None
    faults = _faults(run, steps, epoch_ends, intervals)
    return Account(wall, seconds, ettr, intervals, faults)


def _by_epoch(steps: list[Step]) -> dict[int, list[Step]]:
    by_epoch: dict[int, list[Step]] = {}
    for step in sorted(steps, key=lambda step: (step.epoch, step.step, step.at)):
        epoch_steps = by_epoch.setdefault(step.epoch, [])
        if not epoch_steps or epoch_steps[-1].step != step.step:
            epoch_steps.append(step)
    return by_epoch


def _usual(steps: dict[int, list[Step]]) -> dict[int, float]:
    """Epoch -> seconds of a usual step of that epoch; empty while no epoch has enough steps."""
    medians = {
        epoch: statistics.median(step.step_s for step in epoch_steps)
        for epoch, epoch_steps in steps.items()
        if len(epoch_steps) >= _ENOUGH
    }
    slowest = max(medians.values(), default=None)
    if slowest is None:
        return {}
    return {epoch: medians.get(epoch, slowest) for epoch in steps}


def _ends(run: RunTimeline, steps: dict[int, list[Step]]) -> dict[int, float | None]:
    """Epoch -> the first sign of its end; None for the current epoch. If nothing recorded the end
    because all processes were killed, it is the beginning of the next epoch."""
    spans = {span.epoch: span for span in run.epochs}
    epochs = sorted(spans.keys() | steps.keys())
    borders = [stopped for stopped, _ in run.pauses] + [span.began for span in run.epochs]
    if run.ended is not None:
        borders.append(run.ended)
    ends = {}
    for epoch in epochs:
        span = spans.get(epoch)
        begin = span.began if span else steps[epoch][0].at
        signs = [at for at in (span.noticed, span.ended) if at is not None] if span else []
        ends[epoch] = min(signs or [at for at in borders if at > begin], default=None)
    return ends


def _moments(
    run: RunTimeline,
    steps: dict[int, list[Step]],
    epoch_ends: dict[int, float | None],
) -> Iterator[tuple[float, WallState]]:
    """Yields when each state begins, apart from the time of steps and saves."""
    for begin in [run.created, *(resumed for _, resumed in run.pauses)]:
        began = [span.began for span in run.epochs]
        arrivals = [at for at in [*run.arrivals, *began] if at >= begin]
        if arrivals:
            yield min(arrivals), "rendezvous"
    for span in run.epochs:
        yield span.began, "rendezvous"
        if span.running is not None:
            yield span.running, "startup"
        end = epoch_ends[span.epoch]
        last = steps[span.epoch][-1].at if span.epoch in steps else None
        if last is not None and (end is None or (span.cause is not None and end > last)):
            yield last, "hang"  # `_pieces` covers the part in which a step was in progress
        if end is not None:
            if last is not None and span.cause is None:
                end = max(last, end)  # a planned end: the last step still counts
            yield end, "rendezvous"
    for stopped, resumed in run.pauses:
        signs = [step.at for step in run.steps if step.at < resumed]
        yield min(max([stopped, *signs]), resumed), "waiting"


def _pieces(
    run: RunTimeline,
    steps: dict[int, list[Step]],
    epoch_ends: dict[int, float | None],
    end: float,
) -> Iterator[Interval]:
    """Yields the intervals of steps and saves."""
    furthest = 0
    usual = _usual(steps)
    faulty = {span.epoch for span in run.epochs if span.cause is not None}
    for epoch, epoch_steps in steps.items():
        typical = usual.get(epoch, math.inf)
        yield from _step_pieces(epoch_steps, typical, furthest)
        furthest = max(furthest, epoch_steps[-1].step)
        last = max(step.at for step in epoch_steps)
        ended = epoch_ends[epoch]
        if ended is None:  # still running: a step is in progress
            in_progress = end - last if end - last <= _longest(typical) else typical
            yield Interval(last, last + in_progress, "productive")
        elif epoch in faulty and typical < math.inf:
            # The fault broke off a step, whose work is lost.
            yield Interval(last, min(last + typical, ended), "replay")
        for at, stall, save_epoch in run.saves:
            if save_epoch == epoch and at > last:
                yield Interval(max(last, at - stall), at, "checkpoint_stall")
    for at, stall, save_epoch in run.saves:
        if save_epoch not in steps:  # an epoch that only saved the copies held in memory
            yield Interval(at - stall, at, "checkpoint_stall")


def _longest(typical: float) -> float:
    """Seconds beyond which a step counts as a hang."""
    return HANG_FACTOR * typical + HANG_S


def _step_pieces(
    epoch_steps: list[Step],
    typical: float,
    furthest: int,
) -> Iterator[Interval]:
    """Yields the intervals of one epoch's steps. Steps up to `furthest` are replayed ones."""
    longest = _longest(typical)
    previous = -math.inf
    for step in epoch_steps:
        state: WallState = "productive" if step.step > furthest else "replay"
        furthest = max(furthest, step.step)
        if previous == -math.inf:
            work = step.step_s if step.step_s <= longest else typical
            yield Interval(step.at - work, step.at, state)
        else:
            stall = min(max(step.stall_s, 0.0), max(step.at - previous, 0.0))
            yield Interval(previous, previous + stall, "checkpoint_stall")
            begin = previous + stall
            if step.at - begin > longest:
                yield Interval(begin, step.at - typical, "hang")
                begin = step.at - typical
            yield Interval(begin, step.at, state)
        previous = max(step.at, previous)


# --------------------------------------------------------------------------------------------------
#     faults


def _faults(
    run: RunTimeline,
    steps: dict[int, list[Step]],
    epoch_ends: dict[int, float | None],
    intervals: list[Interval],
) -> list[Fault]:
    broken = [span for span in run.epochs if span.cause is not None or span.outcome == "restart"]
    starts = [
        steps[span.epoch][-1].at if span.epoch in steps else span.running or span.began
        for span in broken
    ]
    costs = _costs(starts, intervals)
    return [
        _fault(span, start, cost, steps, epoch_ends[span.epoch])
        for span, start, cost in zip(broken, starts, costs, strict=True)
    ]


def _fault(
    span: EpochSpan,
    start: float,
    cost: float,
    steps: dict[int, list[Step]],
    end: float | None,
) -> Fault:
    cause = span.cause
    epoch_steps = steps.get(span.epoch)
    later_epochs = (epoch for epoch in sorted(steps) if epoch > span.epoch)
    next_step = next((steps[epoch][0] for epoch in later_epochs), None)
    detected_s = max(0.0, end - start) if end is not None and cause else None
    recovery_s = None
    if next_step and end is not None:
        recovery_s = max(0.0, next_step.at - next_step.step_s - end)
    lost_steps = None
    if next_step:
        last_step = epoch_steps[-1].step if epoch_steps else 0
        lost_steps = max(0, last_step - (next_step.step - 1))
    cause_fields: dict[str, Any] = {"kind": "resize", "text": span.reason}
    if cause:
        cause_fields = {name: getattr(cause, name) for name in ("kind", "node", "rank", "code")}
        cause_fields["text"] = cause.text or span.reason
    return Fault(
        epoch=span.epoch,
        at=start,
        planned=cause is None,
        **cause_fields,
        noticed_s=detected_s,
        back_s=recovery_s,
        lost_steps=lost_steps,
        lost_s=cost,
    )


def _costs(starts: list[float], intervals: list[Interval]) -> list[float]:
    """Seconds of lost time from each start to the next one."""
    costs = []
    for begin, end in zip(starts, [*starts[1:], float("inf")], strict=False):
        cost = 0.0
        for start, stop, state in intervals:
            if state not in ("productive", "checkpoint_stall"):
                cost += max(0.0, min(stop, end) - max(start, begin))
        costs.append(cost)
    return costs
