"""Divides a stretch of time into states, without gaps and without overlaps. Pure.

The states follow the definition of ETTR, the effective training time ratio (Kokolis et al., arXiv
2410.21680, section 3: productive over available wall time). Lost time is split by the component
that could recover it.
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
    "replay": "steps recomputed after a fault, and the step that the fault broke off",
    "startup": "workers start: imports, connections, reading a checkpoint, first use",
    "checkpoint_stall": "training waits for a save",
    "rendezvous": "workers end, nodes and ranks are agreed on, plans are distributed",
    "waiting": "no agent runs: the job is queued, or the run has not been resumed",
    "hang": "no step ends, and no cause has been detected",
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
    """Divides [start, end) into adjacent intervals; neighbours with the same state are joined.

    Each of the `moments` starts a state that holds until the next one; `first` holds before all of
    them. `pieces` override the moments; where two pieces overlap, the one that begins earlier
    wins. Times outside of [start, end) are cut off, so clocks that disagree can misplace a second,
    but never lose it or count it twice.
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
        """Copies the base intervals from the current position to `until`."""
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
    """Seconds in each state, including the states that never occurred."""
    sums: dict[WallState, float] = dict.fromkeys(STATES, 0.0)
    for start, end, state in intervals:
        sums[state] += end - start
    return sums
