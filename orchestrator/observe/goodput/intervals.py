"""Interval partition: a stretch of time cut into states, without a gap and without an overlap.
Pure.

The states follow the table of effective training time that ETTR is taken from (Kokolis et al.,
arXiv 2410.21680, section 3: productive over available wall time), with what is lost split by who
could win it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

WallState = Literal[
    "productive", "replay", "startup", "checkpoint_stall", "rendezvous", "waiting", "hang"
]
STATES: tuple[WallState, ...] = get_args(WallState)

MEANING: dict[WallState, str] = {
    "productive": "steps that no earlier epoch of the run had done",
    "replay": "steps done again after a fault, and the step that it broke off",
    "startup": "workers start: imports, connections, reading a checkpoint, first use",
    "checkpoint_stall": "training waits for a save",
    "rendezvous": "workers end, nodes and ranks are agreed on, plans change hands",
    "waiting": "no agent runs: the scheduler has no place, or nobody has resumed the run",
    "hang": "no step ends, and nobody has noticed why",
}


class Interval(NamedTuple):
    """[start, end) in Unix seconds."""

    start: float
    end: float
    state: WallState


def partition(
    start: float,
    end: float,
    moments: Iterable[tuple[float, WallState]],
    pieces: Iterable[Interval] = (),
    first: WallState = "waiting",
) -> list[Interval]:
    """[start, end) as intervals that touch and never overlap, neighbours of one state joined.

    `moments`: from then on that state holds, until the next one; `first` before all of them.
    `pieces` lie over that; of two that overlap the one that begins earlier keeps what it has.
    Whatever lies outside is cut off, so clocks that disagree can misplace a second, but never lose
    or double one.
    """
    if end <= start:
        return []
    base: list[Interval] = []
    position = start
    state = first
    for moment_at, next_state in sorted(moments, key=lambda moment: moment[0]):
        moment_at = min(max(moment_at, start), end)
        if moment_at > position:
            base.append(Interval(position, moment_at, state))
            position = moment_at
        state = next_state
    base.append(Interval(position, end, state))
    result: list[Interval] = []
    base_intervals = iter(base)
    current = next(base_intervals)
    position = start

    def fill(until: float) -> None:
        """The base, from where we are."""
        nonlocal current, position
        while position < until:
            while current.end <= position:
                current = next(base_intervals)
            stop = min(current.end, until)
            _put(result, Interval(position, stop, current.state))
            position = stop

    for piece in sorted(pieces, key=lambda interval: interval.start):
        piece_start = max(piece.start, position)
        piece_end = min(piece.end, end)
        if piece_end > piece_start:
            fill(piece_start)
            _put(result, Interval(piece_start, piece_end, piece.state))
            position = piece_end
    fill(end)
    return result


def _put(result: list[Interval], new: Interval) -> None:
    if result and result[-1].state == new.state:
        result[-1] = result[-1]._replace(end=new.end)
    elif new.end > new.start:
        result.append(new)


def totals(intervals: Iterable[Interval]) -> dict[WallState, float]:
    """Seconds in each state, all of them named."""
    sums: dict[WallState, float] = dict.fromkeys(STATES, 0.0)
    for start, end, state in intervals:
        sums[state] += end - start
    return sums
