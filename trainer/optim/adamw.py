"""AdamW (arXiv 1711.05101) by one fused call for many shards, which reads and writes each element
once: 1.9 ms for 4 million elements on a CPU, where separate operations take 6.1 ms.

Constructing `torch.optim.AdamW` would import `torch._dynamo`, a second and 100 MiB per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.plan.document import Optim
from trainer.compat import fused_adamw_
from trainer.parallel.params import StateKind

from .rule import Shard, Update


class AdamW:
    kinds: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, optim: Optim):
        self.optim = optim

    def step(self, shards: Sequence[Shard], update: Update, decay: bool) -> None:
        optim = self.optim
        fused_adamw_(
            [shard.master for shard in shards],
            [shard.grad for shard in shards],
            [shard.state["exp_avg"] for shard in shards],
            [shard.state["exp_avg_sq"] for shard in shards],
            update.number,
            skip=update.skip,
            lr=update.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay if decay else 0.0,
        )
