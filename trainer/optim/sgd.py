"""SGD with momentum and decoupled weight decay (arXiv 1711.05101, algorithm 1: SGDW)."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.plan.document import Optim
from trainer.parallel.params import StateKind

from .rule import Shard, Update


class Sgd:
    kinds: tuple[StateKind, ...] = ("momentum",)

    def __init__(self, optim: Optim):
        self.momentum = optim.beta1
        self.weight_decay = optim.weight_decay

    def step(self, shards: Sequence[Shard], update: Update, decay: bool) -> None:
        """m = beta1 m + g; w = (1 - lr decay) w - lr m."""
        keep = 1 - update.lr * self.weight_decay if decay else 1.0
        for shard in shards:
            momentum = shard.grad.add_(shard.state["momentum"], alpha=self.momentum)
            update.set(shard.state["momentum"], momentum)
            update.set(
                shard.master,
                (shard.master * keep).sub_(momentum, alpha=update.lr),
            )
