"""1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503; Megatron-LM 2104.04473, section
2.2).

Rank r runs p - 1 - r forwards ahead, then one forward and one backward in turn. Bubble (p - 1) / m
as AFAB, but rank r never holds more than p - r micro-batches. With one rank this is plain gradient
accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    ahead = min(pp - 1 - rank, micro_batches)
    yield from (Action(Kind.F, rank, index) for index in range(ahead))
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Action(Kind.F, rank, index + ahead)
        yield Action(Kind.B, rank, index)
