"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules that each predict
one more token ahead.

Module k (from 1) reads, at token i, the state from which the output projection read at depth k - 1,
and the embedding of token i + k. Both are normalised and projected together to one state. A decoder
block of the kind of the model's last one and a norm transform it, and the model's own output
projection predicts token i + k + 1 from the result. Embedding and output projection are the
model's own, without copies.

The loss is `mtp.weight` times the mean over depths of the sum over targets of -log p(target),
divided once by the step's global number of valid tokens, those of the main loss.
`trainer.data.batch.look_ahead` decides which targets count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestrator.plan.document import Model, Mtp
from orchestrator.plan.flops import prediction_blocks

from .block import Block
from .documents import Documents
from .linear import Linear
from .norm import make_norm
from .rope import Rope

#: The name of the term of the loss.
MTP = "mtp"


class PredictionBlock(Block):
    """x and token [b, s, hidden], the state of the previous depth and the embedding of the next
    token -> [b, s, hidden].

    The blocks' numbers follow those of the model's layers. Inputs and output may be sequence
    shards; the projection is whole on every tensor-parallel rank.
    """

    def __init__(self, model: Model):
        super().__init__(model, model.layers - 1)
        self.norm_token, self.norm_hidden, self.norm_out = (make_norm(model) for _ in range(3))
        self.project = Linear(2 * model.hidden, model.hidden)

    def forward(  # type: ignore[override]  # it also reads a token
        self,
        x: Tensor,
        token: Tensor,
        token_index: Tensor | None = None,
        documents: Documents | None = None,
        rope: Rope | None = None,
        shard_index: Tensor | None = None,
    ) -> Tensor:
        token_and_state = torch.cat([self.norm_token(token), self.norm_hidden(x)], -1)
        state = self.project(token_and_state)
        return self.norm_out(super().forward(state, token_index, documents, rope, shard_index))


def numbers(model: Model) -> range:
    """Returns the prediction blocks' numbers, which follow those of the model's layers."""
    return range(model.layers, model.layers + prediction_blocks(model))


def prediction_loss(
    mtp: Mtp,
    x: Tensor,
    targets: Tensor,
    step: Callable[[int, Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Returns the loss of the further predictions.

    `x`: the state that the output projection reads; `targets` int64 [b, s, depth]; `step(k, state)`
    returns the state of depth k + 1; `loss(state, targets)` returns the sum over its targets.
    """
    total: Tensor | None = None
    for k in range(mtp.depth):
        x = step(k, x)
        depth_loss = loss(x, targets[..., k])
        total = depth_loss if total is None else total + depth_loss
    assert total is not None, "a plan without depth has no key model.mtp"
    return total * (mtp.weight / mtp.depth)
