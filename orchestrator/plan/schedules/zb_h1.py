"""ZB-H1: 1F1B with the backward split, at 1F1B's memory (Qi et al. 2023, arXiv 2401.10241, section
2).

Rank r postpones its weight gradients by r micro-batches, so that every rank holds p micro-batches
and the tail of the step is filled with W. Bubble (p - 1)(F + I - W): a third of 1F1B's when F = I =
W.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action
from .split_backward import postponed


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    return postponed(
        stage=rank,
        micro_batches=micro_batches,
        ahead=pp - 1 - rank,
        behind=rank,
    )
