"""Modules that `transformers` does not have, or computes in fp32 whatever the weights are, by their
formulas in fp32 or wider. Routers use given choices, since in narrow precisions two correct
programs may choose differently."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn


def wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(wider(x.dtype))
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale * self.weight).to(x.dtype)


class Angles(nn.Module):
    """The cos and sin of position * base^(-2 i / d) (arXiv 2104.09864), for i and the same for
    i + d / 2. With `yarn` (arXiv 2309.00071) dimensions that turn seldom over the original length
    turn `factor` times slower."""

    def __init__(self, base: float, size: int, yarn: dict[str, Any] | None):
        super().__init__()
        speeds = [base ** (-2 * i / size) for i in range(size // 2)]
        if yarn:
            factors = stretch(base, size, yarn)
            speeds = [speed * factor for speed, factor in zip(speeds, factors, strict=True)]
        self.speeds: Tensor
        self.speeds = torch.tensor(speeds * 2, dtype=torch.float64)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.speeds
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def stretch(base: float, size: int, yarn: dict[str, Any]) -> list[float]:
    """Returns the factor of each speed: 1 for dimensions below the one that turns `beta_fast` times
    over the original length, 1 / factor above the one that turns `beta_slow` times, and on a
    straight line between."""

    def turns(times: float) -> float:
        length = yarn["original_seq_len"] / (2 * math.pi * times)
        return size / 2 * math.log(length) / math.log(base)

    low = max(math.floor(turns(yarn.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(turns(yarn.get("beta_slow", 1.0))), size - 1)
    shares = [min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0) for i in range(size // 2)]
    return [share / yarn["factor"] + 1 - share for share in shares]


class Router(nn.Module):
    """Maps inputs [n, hidden] and their choices, int64 [n, k], to (logits [n, experts], scores [n,
    experts], weights of the choices [n, k]). Scores are the soft-max over all experts (arXiv
    2401.04088), or a sigmoid of each (arXiv 2412.19437, section 2.1.2)."""

    def __init__(self, moe: dict[str, Any], hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(moe["experts"], hidden))
        self.soft = moe.get("score", "softmax") == "softmax"
        self.normed = moe.get("norm_topk", True)
        self.scale = moe.get("routed_scale", 1.0)

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = wider(x.dtype)
        logits = x.to(wide) @ self.weight.to(wide).T
        scores = logits.softmax(-1) if self.soft else logits.sigmoid()
        weights = scores.gather(-1, chosen)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, scores, weights * self.scale


class Mixture(nn.Module):
    """The replacement of a layer's MLP: experts of `transformers`, by the choices in `chosen` [b,
    s, k], and shared ones.

    It keeps the tensors of a forward that the judge compares: `scores` [b, s, experts]; `logits`
    and `weights` of the choices [b, s, k]; the two terms of the loss, `balance` [b] (of the whole
    batch: [b, s]) and `z` [b, s], without their weights. `load` [experts] is how often the step
    before chose each expert, over the mean, if the whole batch is balanced.
    """

    def __init__(
        self, moe: dict[str, Any], hidden: int, experts: nn.Module, shared: nn.Module | None
    ):
        super().__init__()
        self.router = Router(moe, hidden)
        self.experts = experts
        self.shared = shared
        self.moe = moe
        self.chosen: Tensor
        self.load: Tensor | None = None
        self.scores: Tensor
        self.logits: Tensor
        self.weights: Tensor
        self.balance: Tensor
        self.z: Tensor

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = self.chosen.flatten(0, 1)
        logits, scores, weights = self.router(flat, chosen)
        self.scores = scores.unflatten(0, x.shape[:2])
        self.weights = weights.unflatten(0, x.shape[:2])
        self.logits = logits.gather(-1, chosen).view_as(self.weights)
        if self.load is None:
            self.balance = balance(self.scores, self.chosen)
        else:
            self.balance = shares(self.scores) @ self.load
        self.z = logits.logsumexp(-1).square().unflatten(0, x.shape[:2])
        is_taken = taken_choices(self.chosen, self.moe).flatten(0, 1)
        out = self.experts(flat, chosen, weights * is_taken).view_as(x)
        return out if self.shared is None else out + self.shared(x)


def taken_choices(chosen: Tensor, moe: dict[str, Any]) -> Tensor:
    """Returns bool [b, s, k]: whether an expert takes a choice. With a capacity factor it takes the
    first tokens of a sequence that choose it, up to the factor times an equal share of the
    sequence's choices, rounded up."""
    is_taken = torch.ones_like(chosen, dtype=torch.bool)
    if "capacity_factor" not in moe:
        return is_taken
    share = Fraction(chosen.shape[1] * chosen.shape[2], moe["experts"])
    capacity = math.ceil(Fraction(str(moe["capacity_factor"])) * share)
    for expert in range(moe["experts"]):
        chooses = chosen == expert
        is_taken &= ~chooses | (chooses.any(-1).cumsum(1) <= capacity)[..., None]
    return is_taken


def balance(scores: Tensor, chosen: Tensor) -> Tensor:
    """Returns [sequences]: the sum over experts of f * P (arXiv 2412.19437, equations 17 to 20),
    where f is how often the sequence's tokens chose the expert, over the equal number, and P is the
    mean share of the expert in the scores."""
    tokens, experts = scores.shape[1:]
    counts = torch.stack([(chosen == expert).sum((1, 2)) for expert in range(experts)], -1)
    frequencies = counts.to(scores.dtype) * experts / (chosen.shape[-1] * tokens)
    return (frequencies * shares(scores).mean(1)).sum(-1)


def shares(scores: Tensor) -> Tensor:
    """Returns each expert's share in a token's scores."""
    return scores / scores.sum(-1, keepdim=True)


class Ahead(nn.Module):
    """A module of multi-token prediction (arXiv 2412.19437, section 2.2): the state of the depth
    before and the embedding of a later token, both normalised, projected together, through a
    decoder layer and a norm."""

    def __init__(self, hidden: int, block: nn.Module, norms: list[nn.Module]):
        super().__init__()
        self.norm_token, self.norm_hidden, self.norm_out = norms
        self.project = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = block

    def forward(self, state: Tensor, token: Tensor, **options: Any) -> Tensor:
        both = torch.cat([self.norm_token(token), self.norm_hidden(state)], -1)
        out = self.block(self.project(both), **options)
        return self.norm_out(out[0] if isinstance(out, tuple) else out)
