"""The choice of experts for each token, and the weights of the choices.

Soft-max routers (Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388) score by soft-max over all
experts; sigmoid routers (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) score each expert by itself,
add a balancing bias to the scores for the choice alone, and may limit a token to experts of few
groups (nodes).

Scores are at least fp32: bf16 has 8 bits, and neighbours among 256 experts differ by less. Of equal
scores the expert with the lower number is chosen, so that every layout breaks ties alike.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec import UNSET
from torch import Tensor, nn

from orchestrator.plan.document import Model, Moe

from .dropout import Jitter
from .state import State, add_state

#: The suffix of the names of routers' biases among a model's state.
BIAS = "router.bias"


class Routing(NamedTuple):
    """The choices of n tokens among e experts, k per token."""

    experts: Tensor  # int64 [n, k], best first
    weights: Tensor  # fp32 or float64 [n, k], factors of the experts' outputs
    scores: Tensor  # [n, e], differentiable, for `balance`: they sum to 1
    logits: Tensor  # [n, e]
    accepted: Tensor | None = None  # bool [n, k]: choices that their expert accepts; None: all


class Router(nn.Module):
    """[n, hidden], and numbers of the tokens [n] if `jitter` needs them -> `Routing`.

    Its state without gradient changes with each step. `bias` fp32 [experts], if the plan has one,
    changes only the choice (`balance.bias_change`). `load` fp32 [experts], if the load of the whole
    batch is balanced, is how often the previous step chose each expert, divided by the mean.
    """

    def __init__(self, model: Model, moe: Moe):
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, model.hidden))
        self.jitter = Jitter(moe.jitter, model.hidden) if moe.jitter else None
        self.bias: Tensor | None
        self.register_buffer("bias", None)
        if moe.bias_update is not UNSET:
            add_state(self, "bias", State((moe.experts,)))
        self.load: Tensor | None
        self.register_buffer("load", None)
        if moe.balance_over == "batch" and moe.balance_loss:
            add_state(self, "load", State((moe.experts,), start=1.0))

    def forward(self, x: Tensor, token_index: Tensor | None = None) -> Routing:
        moe = self.moe
        dtype = torch.promote_types(x.dtype, torch.float32)
        x = x.to(dtype)
        if self.jitter is not None:
            assert token_index is not None, "jitter is a function of the token's number"
            x = self.jitter(x, token_index)
        logits = F.linear(x, self.weight.to(dtype))
        scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
        chosen = self.choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if moe.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)
        if moe.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return Routing(chosen, weights * moe.routed_scale, scores, logits)

    def choose(self, scores: Tensor) -> Tensor:
        """Returns the choices int64 [n, k], given scores [n, e] without gradient; the digital twin
        replaces this method (`trainer.twin.choices`)."""
        return best(self._choosable(scores), self.moe.top_k)

    def _choosable(self, scores: Tensor) -> Tensor:
        """Returns the scores for the choice: with the balancing bias, -inf outside the best
        groups."""
        moe = self.moe
        if self.bias is not None:
            scores = scores + self.bias
        if moe.top_groups == moe.groups:
            return scores
        grouped = scores.unflatten(-1, (moe.groups, -1))
        # DeepSeek-V3 ranks groups by their two best experts, DeepSeek-V2 (soft-max) by the best
        # one.
        count = min(2, grouped.shape[-1]) if moe.score == "sigmoid" else 1
        group_scores = grouped.topk(count).values.sum(-1)
        in_best_groups = torch.zeros_like(group_scores, dtype=torch.bool)
        in_best_groups.scatter_(-1, best(group_scores, moe.top_groups), True)
        return grouped.masked_fill(~in_best_groups[..., None], -torch.inf).flatten(-2)


def best(scores: Tensor, count: int) -> Tensor:
    """Returns the indices [..., count] of the highest scores [..., e]; of equal scores the lower
    index comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()
