"""A run's time and faults, counted from its time line. Pure.

What each state begins and ends with is in docs/reliability.md. Times of different nodes are those
nodes' clocks: a skew moves a border between two states, and never makes a second count twice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import msgspec

from orchestrator.observe.timeline import Step

from .intervals import Interval, WallState, partition, totals
from .run_timeline import RunTimeline

#: A step that takes longer than this many usual ones, and a second more, hangs for what is beyond
#: one usual step.
HANG_FACTOR = 5.0
HANG_S = 1.0
_ENOUGH = 3  # steps of an epoch that tell what is usual in it


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch that ended before the run did. Seconds; None: it has not happened, or nobody can
    know."""

    epoch: int
    at: float  # Unix seconds: last step before it, or the start of an epoch that had none
    planned: bool  # nodes came or left: all saved first
    kind: str
    text: str
    node: str | None = None
    rank: int | None = None
    code: int | None = None
    noticed_s: float | None = None  # from the last step to the first sign
    back_s: float | None = None  # from the first sign to the beginning of the next step
    lost_steps: int | None = None  # done again
    lost_s: float = 0.0  # neither productive nor spent on saves, until the next fault


class Account(msgspec.Struct, frozen=True):
    wall_s: float
    seconds: dict[
        WallState, float
    ]  # by state; they sum to wall_s; empty where steps are not reported
    ettr: float | None  # productive / wall
    intervals: list[Interval]
    faults: list[Fault]


def account(run: RunTimeline, now: float) -> Account:
    """`now`: where a run that goes on is cut off. Of a program that reports no steps, nobody knows
    what its time went into: no ETTR and no seconds by state, but its faults."""
    end = run.ended if run.ended is not None else max(now, run.created)
    steps = _by_epoch(run.steps)
    over = _ends(run, steps)
    intervals = partition(
        run.created, end, _moments(run, steps, over), _pieces(run, steps, over, end)
    )
    seconds = totals(intervals)
    wall = end - run.created
    if not run.reports_steps:
        return Account(wall, {}, None, [], _faults(run, steps, over, []))
    ettr = seconds["productive"] / wall if wall > 0 else None
    return Account(wall, seconds, ettr, intervals, _faults(run, steps, over, intervals))


def _by_epoch(steps: list[Step]) -> dict[int, list[Step]]:
    by_epoch: dict[int, list[Step]] = {}
    for step in sorted(steps, key=lambda step: (step.epoch, step.step, step.at)):
        epoch_steps = by_epoch.setdefault(step.epoch, [])
        if not epoch_steps or epoch_steps[-1].step != step.step:
            epoch_steps.append(step)
    return by_epoch


def _usual(steps: dict[int, list[Step]]) -> dict[int, float]:
    """Epoch -> a usual step's seconds in it; empty while no epoch has enough."""
    medians = {
        epoch: statistics.median(step.step_s for step in epoch_steps)
        for epoch, epoch_steps in steps.items()
        if len(epoch_steps) >= _ENOUGH
    }
    slowest = max(medians.values(), default=None)
    return {} if slowest is None else {epoch: medians.get(epoch, slowest) for epoch in steps}


def _ends(run: RunTimeline, steps: dict[int, list[Step]]) -> dict[int, float | None]:
    """Epoch -> the first sign of its end; None for the current one. If nothing recorded the end
    (all were killed), the beginning of the next epoch."""
    spans = {span.epoch: span for span in run.epochs}
    epochs = sorted(spans.keys() | steps.keys())
    borders = [stopped for stopped, _ in run.pauses] + [span.began for span in run.epochs]
    borders += [] if run.ended is None else [run.ended]
    ends = {}
    for epoch in epochs:
        span = spans.get(epoch)
        begin = span.began if span else steps[epoch][0].at
        signs = [at for at in (span.noticed, span.ended) if at is not None] if span else []
        ends[epoch] = min(signs or [at for at in borders if at > begin], default=None)
    return ends


def _moments(
    run: RunTimeline, steps: dict[int, list[Step]], over: dict[int, float | None]
) -> Iterator[tuple[float, WallState]]:
    """When which state begins, where no step and no save is under way."""
    for begin in [run.created, *(resumed for _, resumed in run.pauses)]:
        came = [at for at in run.arrivals if at >= begin] + [
            span.began for span in run.epochs if span.began >= begin
        ]
        if came:
            yield min(came), "rendezvous"
    for span in run.epochs:
        yield span.began, "rendezvous"
        if span.running is not None:
            yield span.running, "startup"
        end = over[span.epoch]
        last = steps[span.epoch][-1].at if span.epoch in steps else None
        if last is not None and (end is None or (span.cause is not None and end > last)):
            yield last, "hang"  # where `_pieces` puts no step that was under way
        if end is not None:
            yield end if last is None or span.cause is not None else max(last, end), "rendezvous"
    for stopped, resumed in run.pauses:
        signs = [step.at for step in run.steps if step.at < resumed]
        yield min(max([stopped, *signs]), resumed), "waiting"


def _pieces(
    run: RunTimeline, steps: dict[int, list[Step]], over: dict[int, float | None], end: float
) -> Iterator[Interval]:
    """Steps and saves, each with its place in time."""
    furthest = 0
    usual = _usual(steps)
    faults = {span.epoch for span in run.epochs if span.cause is not None}
    for epoch, mine in steps.items():
        typical = usual.get(epoch, math.inf)
        longest = HANG_FACTOR * typical + HANG_S
        before = -math.inf
        for step in mine:
            state: WallState = "productive" if step.step > furthest else "replay"
            furthest = max(furthest, step.step)
            if before == -math.inf:
                work = step.step_s if step.step_s <= longest else typical
                yield Interval(step.at - work, step.at, state)
            else:
                stall = min(max(step.stall_s, 0.0), max(step.at - before, 0.0))
                yield Interval(before, before + stall, "checkpoint_stall")
                begin = before + stall
                if step.at - begin > longest:
                    yield Interval(begin, step.at - typical, "hang")
                    begin = step.at - typical
                yield Interval(begin, step.at, state)
            before = max(step.at, before)
        ended = over[epoch]
        if ended is None:  # still running: a step is under way
            under_way = end - before if end - before <= longest else typical
            yield Interval(before, before + under_way, "productive")
        elif (
            epoch in faults and typical < math.inf
        ):  # the step that the fault broke off was for nothing
            yield Interval(before, min(before + typical, ended), "replay")
        for at, stall, of in run.saves:
            if of == epoch and at > before:
                yield Interval(max(before, at - stall), at, "checkpoint_stall")
    for at, stall, of in run.saves:
        if of not in steps:  # an epoch that only saved what memories held
            yield Interval(at - stall, at, "checkpoint_stall")


# ---------------------------------------------------------------------------------------------------------
#     faults


def _faults(
    run: RunTimeline,
    steps: dict[int, list[Step]],
    over: dict[int, float | None],
    intervals: list[Interval],
) -> list[Fault]:
    broken = [span for span in run.epochs if span.cause is not None or span.outcome == "restart"]
    starts = [
        steps[span.epoch][-1].at if span.epoch in steps else span.running or span.began
        for span in broken
    ]
    result = []
    for span, start, cost in zip(broken, starts, _costs(starts, intervals), strict=True):
        cause = span.cause
        end = over[span.epoch]
        mine = steps.get(span.epoch)
        after = next((steps[epoch][0] for epoch in sorted(steps) if epoch > span.epoch), None)
        about = {name: getattr(cause, name) if cause else None for name in ("node", "rank", "code")}
        result.append(
            Fault(
                epoch=span.epoch,
                at=start,
                planned=cause is None,
                kind=cause.kind if cause else "resize",
                text=(cause.text if cause else "") or span.reason,
                **about,
                noticed_s=max(0.0, end - start) if end is not None and cause else None,
                back_s=(
                    max(0.0, after.at - after.step_s - end) if after and end is not None else None
                ),
                lost_steps=(
                    (max(0, mine[-1].step - (after.step - 1)) if mine else 0) if after else None
                ),
                lost_s=cost,
            )
        )
    return result


def _costs(starts: list[float], intervals: list[Interval]) -> list[float]:
    """Seconds that brought nothing, from each start to the next."""
    costs = []
    for begin, end in zip(starts, [*starts[1:], float("inf")], strict=False):
        cost = 0.0
        for start, stop, state in intervals:
            if state not in ("productive", "checkpoint_stall"):
                cost += max(0.0, min(stop, end) - max(start, begin))
        costs.append(cost)
    return costs
