"""AFAB: all forwards, then all backwards (GPipe, Huang et al. 2019, arXiv 1811.06965).

Bubble (p - 1) / m; every rank holds all m micro-batches at the peak. With vpp > 1 it is the
breadth-first schedule of Lamy-Poirier (arXiv 2211.05953): each rank runs all micro-batches through
one of its stages before the next, and the bubble shrinks to (p - 1) / (v m).
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    stages = [chunk * pp + rank for chunk in range(vpp)]
    for stage in stages:
        yield from (Action(Kind.F, stage, index) for index in range(micro_batches))
    for stage in reversed(stages):
        yield from (Action(Kind.B, stage, index) for index in range(micro_batches))
