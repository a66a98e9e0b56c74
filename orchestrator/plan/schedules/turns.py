"""How long schedules take in which every rank goes through the same turns, without building them.

In turn j a rank runs its forward number j + ahead, its backward number j and, where backward is cut
in two, the weight gradient number j - behind; what does not exist is left out. 1F1B, interleaved
1F1B, ZB-H1 and ZB-H2 differ in `ahead` and `behind` alone (see their modules). If rank r is at turn
t + r, everything that it waits for has happened at a smaller t, or on a rank before it: one pass
over t and r is enough, on plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Turns(NamedTuple):
    """Both from (rank, pp, vpp)."""

    ahead: Callable[[int, int, int], int]
    behind: Callable[[int, int, int], int] | None = None  # None: backward is in one piece


TURNS: dict[str, Turns] = {
    "1f1b": Turns(lambda rank, pp, vpp: pp - 1 - rank),
    "interleaved": Turns(lambda rank, pp, vpp: 2 * (pp - 1 - rank) + (vpp - 1) * pp),
    "zb_h1": Turns(lambda rank, pp, vpp: pp - 1 - rank, lambda rank, pp, vpp: rank),
    "zb_h2": Turns(lambda rank, pp, vpp: 2 * (pp - 1 - rank), lambda rank, pp, vpp: 2 * rank),
}


def makespan(
    name: str,
    shape: tuple[int, int, int],
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
) -> float:
    """Seconds from the first start to the last end, as `simulate`, to the last bit. One number a
    model stage each.

    shape: ranks, micro-batches, stages a rank. `name`: one of `TURNS`.
    """
    pp, _, vpp = shape
    rule = TURNS[name]
    units = _units(*shape)
    total = len(units[0])
    ahead = [rule.ahead(rank, pp, vpp) for rank in range(pp)]
    behind = None if rule.behind is None else [rule.behind(rank, pp, vpp) for rank in range(pp)]
    backward = (
        backward_input
        if behind
        else [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
    )
    forwards, backwards = (
        [[0.0] * total for _ in range(pp)] for _ in range(2)
    )  # when each unit is done
    forward_chunk, backward_chunk = units
    free = [0.0] * pp
    lines = []
    for rank in range(
        pp
    ):  # what a rank reads again and again; `shift`: where a micro-batch goes on to another chunk
        near = (forwards[rank - 1], 0 if rank else pp)
        far = (backwards[(rank + 1) % pp], 0 if rank < pp - 1 else pp)
        stages = slice(rank, None, pp)
        lines.append(
            (
                rank,
                ahead[rank],
                forwards[rank],
                *near,
                backwards[rank],
                *far,
                forward[stages],
                backward[stages],
            )
        )
    for turn in range(-ahead[0], total + (behind[-1] - pp + 1 if behind else 0)):
        for rank, early, done, arrivals_f, shift, back, gone, skip, seconds, again in lines:
            unit = turn + rank
            now = free[rank]
            first = unit + early
            if 0 <= first < total and (chunk := forward_chunk[first]) >= 0:
                if (not shift or chunk) and arrivals_f[first - shift] > now:
                    now = arrivals_f[first - shift]
                done[first] = now = now + seconds[chunk]
            if 0 <= unit < total and (chunk := backward_chunk[unit]) >= 0:
                if (not skip or chunk < vpp - 1) and gone[unit - skip] > now:
                    now = gone[unit - skip]
                back[unit] = now = now + again[chunk]
            if behind and 0 <= unit - behind[rank] < total:
                now += backward_weight[rank]
            free[rank] = now
    return max(free)


def _units(pp: int, micro_batches: int, vpp: int) -> tuple[list[int], list[int]]:
    """Which of a rank's stages each forward, and each backward, goes through. -1: its micro-batch
    does not exist.

    Micro-batches go in groups of `pp` through all stages of a rank where it has several
    (`interleaved`).
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
