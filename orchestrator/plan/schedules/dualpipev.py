"""DualPipeV: DualPipe cut in half (Sea AI Lab's note; github.com/deepseek-ai/DualPipe).

Folding DualPipe at its middle removes the second copy of the parameters: rank r holds stages r and
2p - 1 - r of one model, and the two ends of the V are the two directions. Bubble (p - 1)(F&B + B -
3W) in the times of its 2p stages; peak 2p + 1 stage activations.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action
from .counting import count
from .dual import script


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    stages = (rank, 2 * pp - 1 - rank)
    return count(
        script(rank, pp, max(micro_batches, 2 * pp)),
        stages,
        (0, 0),
        micro_batches,
    )
