"""The experts of one layer (a mixture of experts, Shazeer et al. 2017, arXiv 1701.06538), and the layer itself.

No token is dropped and nothing is padded: the copies of tokens are sorted by expert, each expert multiplies its segment
(MegaBlocks, arXiv 2211.15841), and a token sums what its experts returned. The weight of a choice multiplies inside the
expert, before the last matrix: the result is the same, and the expert's outputs need not be kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Model, Moe

from .balance import count_choices, sequence_balance, z_sum
from .linear import identities
from .loss import LossTerms
from .mlp import ACTIVATIONS, MLP, gated
from .router import Router, Routing

#: What is computed while tokens are on their way to experts of other ranks.
Meanwhile = Callable[[], Tensor | None]
#: (x [n, hidden], routing, experts, meanwhile) -> [n, hidden], and what `meanwhile` returns
Dispatch = Callable[[Tensor, Routing, "Experts", Meanwhile], tuple[Tensor, Tensor | None]]
#: (x [b, s, hidden], routing of its tokens) -> the same of the tokens that this rank's experts shall see
Enter = Callable[[Tensor, Routing], tuple[Tensor, Routing]]
#: Terms of the loss.
BALANCE, Z = "expert_balance", "router_z"


class GroupedLinear(nn.Module):
    """x [n, in] in segments, `counts` [experts] rows each -> [n, out]: a segment times its own matrix [out, in]."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(x, self.weight, counts)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One kernel on CUDA in bf16, a product a segment elsewhere."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    segments = x.split(counts.tolist())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(segments, weight.unbind(0), strict=True)])


class Experts(nn.Module):
    """Rows sorted by expert [n, hidden], `counts` int64 [experts], `weights` [n] -> weighted outputs [n, hidden]."""

    def __init__(self, model: Model, moe: Moe):
        super().__init__()
        shape = moe.experts, model.hidden, moe.ffn_hidden
        self.gate = GroupedLinear(*shape) if model.mlp == "gated" else None
        self.up = GroupedLinear(*shape)
        self.down = GroupedLinear(moe.experts, moe.ffn_hidden, model.hidden)
        self.activation = model.activation

    @property
    def count(self) -> int:
        """Experts on this rank."""
        return self.up.weight.shape[0]

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        up = self.up(x, counts)
        activation = self.activation
        inner = ACTIVATIONS[activation](up) if self.gate is None else gated(self.gate(x, counts), up, activation)
        return self.down((inner * weights[:, None]).to(x.dtype), counts)


class MixtureOfExperts(nn.Module):
    """[b, s, hidden] -> [b, s, hidden]: stands in a block where a dense layer has its MLP.

    `enter`, `sum_counts`, `dispatch`, `shared_in` and `shared_out` are replaceable: parallelism puts its communication
    there. `terms`, where they are set, get the terms that balance the experts.
    """

    def __init__(self, model: Model, moe: Moe):
        super().__init__()
        self.router, self.experts = Router(model, moe), Experts(model, moe)
        self.shared = MLP(model, moe.shared_ffn_hidden) if moe.shared_ffn_hidden else None
        self.out_bias = None
        self.enter: Enter = _enter
        self.shared_in, self.shared_out = identities(2)
        self.dispatch: Dispatch = dispatch
        self.sum_counts: Callable[[Tensor], Tensor] = _alone  # over ranks that hold parts of the same sequences
        self.terms: LossTerms | None = None

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x.flatten(0, -2))
        if self.terms is not None:
            x = self._add_terms(x, routing, self.terms)
        x, routing = self.enter(x, routing)

        def shared() -> Tensor | None:
            return None if self.shared is None else self.shared_out(self.shared(self.shared_in(x)))

        out, beside = self.dispatch(x.flatten(0, -2), routing, self.experts, shared)
        return out.view_as(x) if beside is None else out.view_as(x) + beside

    def _add_terms(self, x: Tensor, routing: Routing, terms: LossTerms) -> Tensor:
        moe = self.router.moe
        if moe.balance_loss:
            counts = self.sum_counts(count_choices(routing, len(x)))
            x = terms.add(BALANCE, x, moe.balance_loss * sequence_balance(routing, counts), divisor=terms.samples)
        if moe.z_loss:
            x = terms.add(Z, x, moe.z_loss * z_sum(routing), divisor=terms.tokens)
        return x


def term_names(model: Model) -> list[str]:
    """The terms that a model's experts add to the loss."""
    moe = model.moe
    return [name for name, weight in ((BALANCE, moe.balance_loss), (Z, moe.z_loss)) if weight] if moe else []


def _enter(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    return x, routing


def _alone(counts: Tensor) -> Tensor:
    return counts


class Copies(NamedTuple):
    """A copy of a token for each of its k choices, sorted by expert."""

    rows: Tensor  # [n * k, hidden]
    weights: Tensor  # [n * k]
    counts: Tensor  # int64 [experts of the layer]
    order: Tensor  # int64 [n * k]: which choice each copy is, token after token

    @classmethod
    def of(cls, x: Tensor, routing: Routing, experts: int) -> Copies:
        """Of tokens [n, hidden] for a layer of so many experts."""
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        rows, weights = x[order // routing.experts.shape[-1]], routing.weights.flatten()[order]
        return cls(rows, weights, torch.bincount(chosen, minlength=experts), order)

    def summed(self, out: Tensor, routing: Routing) -> Tensor:
        """What experts returned for the copies, [n * k, hidden], summed over each token's -> [n, hidden]."""
        return out[self.order.argsort()].unflatten(0, routing.experts.shape).sum(1)


def dispatch(x: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> tuple[Tensor, Tensor | None]:
    """All experts on this rank."""
    copies = Copies.of(x, routing, experts.count)
    return copies.summed(experts(copies.rows, copies.counts, copies.weights), routing), meanwhile()


def nothing() -> None:
    """A `Meanwhile`."""
