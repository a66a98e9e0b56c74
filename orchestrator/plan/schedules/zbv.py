"""ZB-V: two stages per rank in a V, split backward, 1F1B's memory (Qi et al., arXiv 2401.10241,
section 6; 2405.15362).

Rank r holds stages r and 2p - 1 - r, so the first rank also has the loss and a micro-batch's
backward starts where its forward ended. No bubble when F = I = W and m >= 2p - 1; every rank holds
2p half-size stage activations, as much as 1F1B's first rank, evenly spread.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind
from .counting import Step, count

F = Kind.F
I = Kind.I
W = Kind.W


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    stages = (rank, 2 * pp - 1 - rank)
    return count(
        _script(rank, pp, max(micro_batches, 2 * pp - 1)),
        stages,
        (0, 0),
        micro_batches,
    )


def _script(rank: int, pp: int, micro_batches: int) -> Iterator[Step]:
    forwards = 2 * (pp - rank) - 1  # of chunk 0, so far
    backwards = pp - rank  # of chunk 1, so far
    yield from [(F, 0)] * forwards
    yield from [(F, 1), (F, 0)] * rank
    yield from [(F, 1), (I, 1), (W, 1)] * backwards
    forwards += rank
    while backwards + rank < micro_batches:
        if forwards < micro_batches:
            yield F, 0
            forwards += 1
        yield from [(I, 0), (W, 0), (F, 1), (I, 1), (W, 1)]
        backwards += 1
    yield from [(I, 0), (I, 1)] * rank
    yield from [(I, 0), (W, 0)] * (pp - rank)
    yield from [(W, 0)] * (2 * rank)
