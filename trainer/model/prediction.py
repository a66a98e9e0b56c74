"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules that each predict
one more token ahead.

Module k (from 1) reads, at the token i, the state from which the output projection read at depth k
- 1, and the embedding of the token i + k. Both are normalised and projected together to one state,
which goes through a decoder block of the kind of the model's last one and through a norm; the
model's own output projection reads that and predicts the token i + k + 1. Embedding and output
projection are the model's: they have no copies.

The loss is `mtp.weight` times the mean over depths of the sum over targets of -log p(target),
divided once by the step's global number of valid tokens, those of the main loss.
`trainer.data.batch.look_ahead` says which targets count.
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

#: The term of the loss.
MTP = "mtp"


class PredictionBlock(Block):
    """x, token [b, s, hidden], the state of the depth before and the embedding of the next token ->
    [b, s, hidden].

    Numbered on from the model's layers. Inputs and output may be sequence shards; the projection is
    whole on every tensor-parallel rank.
    """

    def __init__(self, model: Model):
        super().__init__(model, model.layers - 1)
        self.norm_token, self.norm_hidden, self.norm_out = (make_norm(model) for _ in range(3))
        self.project = Linear(2 * model.hidden, model.hidden)

    def forward(  # type: ignore[override]  # it reads a token, too
        self,
        x: Tensor,
        token: Tensor,
        token_index: Tensor | None = None,
        documents: Documents | None = None,
        rope: Rope | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        token_and_state = torch.cat([self.norm_token(token), self.norm_hidden(x)], -1)
        return self.norm_out(
            super().forward(self.project(token_and_state), token_index, documents, rope, rows)
        )


def numbers(model: Model) -> range:
    """The prediction blocks' numbers: they go on where the model's layers end."""
    return range(model.layers, model.layers + prediction_blocks(model))


def prediction_loss(
    mtp: Mtp,
    x: Tensor,
    targets: Tensor,
    step: Callable[[int, Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`x`: the state that the output projection reads; `targets` int64 [b, s, depth]; `step(k,
    state)`: the state of depth k + 1; `loss(state, targets)`: the sum over its targets."""
    total: Tensor | None = None
    for k in range(mtp.depth):
        x = step(k, x)
        depth_loss = loss(x, targets[..., k])
        total = depth_loss if total is None else total + depth_loss
    assert total is not None, "a plan without depth has no key model.mtp"
    return total * (mtp.weight / mtp.depth)
