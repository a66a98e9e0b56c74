"""ZB-H2: no bubble when F = I = W, at about twice the memory of 1F1B (arXiv 2401.10241, section 2).

Rank r runs 2(p - 1 - r) forwards ahead and postpones its weight gradients by 2 r micro-batches, so
that every rank holds 2p - 1 micro-batches. Each rank then works without a gap from its first action
to its last (m >= 2p - 1); the ranks start and end one F apart. Bubble (p - 1)(F + I - 2W).
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action
from .split_backward import postponed


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    return postponed(
        stage=rank,
        micro_batches=micro_batches,
        ahead=2 * (pp - 1 - rank),
        behind=2 * rank,
    )
