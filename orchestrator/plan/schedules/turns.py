"""Computes how long a schedule takes in which every rank repeats the same turn, without building
the schedule.

In turn j a rank runs its forward number j + ahead, its backward number j and, if backward is split,
its weight gradient number j - behind; numbers that do not exist are left out. 1F1B, interleaved
1F1B, ZB-H1 and ZB-H2 differ only in `ahead` and `behind` (see their modules). If rank r is at turn
t + r, its inputs come from a smaller t or a lower rank, so one pass over t and r is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Turns(NamedTuple):
    """Functions of (rank, pp, vpp) that give a schedule's distances between forward, backward and
    weight gradient."""

    ahead: Callable[[int, int, int], int]
    behind: Callable[[int, int, int], int] | None = None  # None: backward is in one piece


TURNS: dict[str, Turns] = {
    "1f1b": Turns(lambda rank, pp, vpp: pp - 1 - rank),
    "interleaved": Turns(lambda rank, pp, vpp: 2 * (pp - 1 - rank) + (vpp - 1) * pp),
    "zb_h1": Turns(lambda rank, pp, vpp: pp - 1 - rank, lambda rank, pp, vpp: rank),
    "zb_h2": Turns(lambda rank, pp, vpp: 2 * (pp - 1 - rank), lambda rank, pp, vpp: 2 * rank),
}


#: One rank's part of the pass over all turns: rank; forwards before the first backward; then for
#: forward and backward each the ends of its own units, the ends of the neighbour's units that it
#: waits for, and the shift, the number of units after which the neighbour's result belongs to
#: another chunk; at the end the seconds of each chunk, forward and backward. A plain tuple, because
#: named tuples unpack slowly.
_Line = tuple[
    int,
    int,
    list[float],
    list[float],
    int,
    list[float],
    list[float],
    int,
    Sequence[float],
    Sequence[float],
]


def makespan(
    name: str,
    shape: tuple[int, int, int],
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
) -> float:
    """Seconds from the first start to the last end, equal to `simulate` to the last bit. Each cost
    has one number per model stage.

    `shape`: ranks, micro-batches, stages per rank. `name`: one of `TURNS`.
    """
    pp, _, vpp = shape
    rule = TURNS[name]
    chunks = _units(*shape)
    ahead = [rule.ahead(rank, pp, vpp) for rank in range(pp)]
    behind = None
    backward = backward_input
    if rule.behind is not None:
        behind = [rule.behind(rank, pp, vpp) for rank in range(pp)]
    else:
        backward = [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
    lines = _lines(ahead, len(chunks[0]), forward, backward)
    return _run(
        lines,
        chunks,
        behind,
        weight_s=backward_weight,
        vpp=vpp,
    )


def _lines(
    ahead: list[int],
    total: int,
    forward: Sequence[float],
    backward: Sequence[float],
) -> list[_Line]:
    """Collects what each rank reads in every turn."""
    pp = len(ahead)
    forward_ends = [[0.0] * total for _ in range(pp)]
    backward_ends = [[0.0] * total for _ in range(pp)]
    lines = []
    for rank in range(pp):
        forward_shift = 0 if rank else pp
        backward_shift = pp if rank == pp - 1 else 0
        line = (
            rank,
            ahead[rank],
            forward_ends[rank],
            forward_ends[rank - 1],
            forward_shift,
            backward_ends[rank],
            backward_ends[(rank + 1) % pp],
            backward_shift,
            forward[rank::pp],
            backward[rank::pp],
        )
        lines.append(line)
    return lines


def _run(
    lines: list[_Line],
    chunks: tuple[list[int], list[int]],
    behind: list[int] | None,
    *,
    weight_s: Sequence[float],
    vpp: int,
) -> float:
    """Runs all turns. Returns the end of the last one."""
    forward_chunk, backward_chunk = chunks
    total = len(forward_chunk)
    free = [0.0] * len(lines)
    first_turn = -lines[0][1]
    last_turn = total + (behind[-1] - len(lines) + 1 if behind else 0)
    for turn in range(first_turn, last_turn):
        for rank, ahead, ends, inputs, shift, back_ends, back_inputs, back_shift, f_s, b_s in lines:
            unit = turn + rank
            now = free[rank]
            first = unit + ahead
            if 0 <= first < total and (chunk := forward_chunk[first]) >= 0:
                if (not shift or chunk) and inputs[first - shift] > now:
                    now = inputs[first - shift]
                ends[first] = now = now + f_s[chunk]
            if 0 <= unit < total and (chunk := backward_chunk[unit]) >= 0:
                if (not back_shift or chunk < vpp - 1) and back_inputs[unit - back_shift] > now:
                    now = back_inputs[unit - back_shift]
                back_ends[unit] = now = now + b_s[chunk]
            if behind and 0 <= unit - behind[rank] < total:
                now += weight_s[rank]
            free[rank] = now
    return max(free)


def _units(pp: int, micro_batches: int, vpp: int) -> tuple[list[int], list[int]]:
    """Lists the chunk of a rank that each forward, and each backward, passes; -1 if its micro-batch
    does not exist.

    If a rank has several chunks, micro-batches pass them in groups of `pp` (`interleaved`).
    """
    if vpp == 1:
        return [0] * micro_batches, [0] * micro_batches
    first = []
    last = []
    for group in range(0, micro_batches, pp):
        for chunk in range(vpp):
            existing = [micro_batch < micro_batches for micro_batch in range(group, group + pp)]
            first += [chunk if exists else -1 for exists in existing]
            last += [vpp - 1 - chunk if exists else -1 for exists in existing]
    return first, last
