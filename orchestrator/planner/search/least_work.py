"""The least work of a micro-batch over all folds of the experts, which bounds every layout of a
mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.plan.document import CpMethod

from .layer_cost import LayerCost, remembered


class LeastWork(NamedTuple):
    """Seconds of one micro-batch that no fold of the experts undercuts.

    Communication and recomputation are included.
    """

    forwards: float  # forward through the whole model
    backwards: float  # backward through the whole model
    layer: float  # forward and backward through one layer of either kind
    forward: float  # forward through one layer of either kind


def least_work(
    costs: Sequence[LayerCost],
    recompute: str,
    cp_methods: tuple[CpMethod, ...],
    sp_open: bool,
) -> LeastWork:
    """Returns the least work over folds; `costs` has one entry per fold."""

    def least() -> LeastWork:
        """Computes the least work."""
        every = [cost.least(recompute, cp_methods, sp_open) for cost in costs]
        dense = costs[0].dense
        moe = costs[0].moe
        layer_counts = (dense, moe)
        first = min(cost.first for cost in every)
        forward, backward, last = (
            [min(kind) for kind in zip(*kinds, strict=True)]
            for kinds in zip(
                *((cost.forward, cost.backward, cost.last) for cost in every),
                strict=True,
            )
        )
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        return LeastWork(
            forwards=dense * forward[0] + moe * forward[1] + first + last[0],
            backwards=dense * backward[0] + moe * backward[1] + last[1],
            layer=min(
                seconds for seconds, layers in zip(both, layer_counts, strict=True) if layers
            ),
            forward=min(
                seconds for seconds, layers in zip(forward, layer_counts, strict=True) if layers
            ),
        )

    key = "least", len(costs), recompute, cp_methods, sp_open
    work: LeastWork = remembered(costs[0].known, key, least)
    return work
