"""Which experts a token goes to, and with what weight.

Soft-max routers (Mixtral, arXiv 2401.04088; Qwen3, arXiv 2505.09388) score by soft-max over all
experts; sigmoid routers (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) score each expert by itself,
add a balancing bias to the scores for the choice alone, and may limit a token to experts of few
groups (nodes).

Scores are never below fp32: bf16 has 8 bits, and neighbours among 256 experts differ by less. Equal
scores go to the expert with the lower number, so that every layout breaks ties alike.
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

#: How the name of a router's bias ends, among the state of a model.
BIAS = "router.bias"


class Routing(NamedTuple):
    """Choices of n tokens among e experts, k each."""

    experts: Tensor  # int64 [n, k], best first
    weights: Tensor  # fp32 or float64 [n, k]: by how much each expert's output counts
    scores: Tensor  # [n, e], differentiable, as `balance` wants them: they sum to 1
    logits: Tensor  # [n, e]
    accepted: Tensor | None = None  # bool [n, k]: choices that their expert takes; None: all


class Router(nn.Module):
    """[n, hidden], and numbers of the tokens [n] where `jitter` needs them -> `Routing`. Without
    gradient, and changed by each step: `bias` fp32 [experts], where the plan has it, moves the
    choice alone (`balance.bias_change`); `load` fp32 [experts], where the load of the whole batch
    is balanced, is how often the step before chose each expert, over the mean.
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
            assert token_index is not None, "jitter is of a token's number"
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
        """int64 [n, k], of scores [n, e] without gradient; a twin has its own
        (`trainer.twin.choices`)."""
        return best(self._choosable(scores), self.moe.top_k)

    def _choosable(self, scores: Tensor) -> Tensor:
        """Scores for the choice: with the balancing bias, -inf outside of the best groups."""
        moe = self.moe
        if self.bias is not None:
            scores = scores + self.bias
        if moe.top_groups == moe.groups:
            return scores
        grouped = scores.unflatten(-1, (moe.groups, -1))
        # DeepSeek-V3 ranks groups by their two best experts, DeepSeek-V2 (soft-max) by the best
        # one.
        group_scores = grouped.topk(
            min(2, grouped.shape[-1]) if moe.score == "sigmoid" else 1
        ).values.sum(-1)
        in_best_groups = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
            -1, best(group_scores, moe.top_groups), True
        )
        return grouped.masked_fill(~in_best_groups[..., None], -torch.inf).flatten(-2)


def best(scores: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the highest scores [..., e], the lower index first where they are
    equal."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()
