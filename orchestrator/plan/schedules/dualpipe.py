"""DualPipe (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1).

Two copies of the model run in opposite directions: rank r holds stage r of the first and stage p -
1 - r of the second, and half of the micro-batches enter at each end. Bubble (p / 2 - 1)(F&B + B -
3W), where F&B is a forward and a backward run together; peak p + 1 stage activations; parameters
held twice.

Ranks r and p - 1 - r hold the same two stages, so their gradients are also summed over that pair,
like over one more data-parallel dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action
from .counting import count
from .dual import script


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    per_direction = micro_batches // 2  # a direction
    stages = (rank, 2 * pp - 1 - rank)
    firsts = (0, per_direction)
    if rank >= pp // 2:  # the second half of the ranks is the mirror image of the first
        stages = stages[::-1]
        firsts = firsts[::-1]
    return count(
        script(min(rank, pp - 1 - rank), pp // 2, max(per_direction, pp)),
        stages,
        firsts,
        per_direction,
    )
