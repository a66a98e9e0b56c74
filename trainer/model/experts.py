"""The experts of one layer (a mixture of experts, Shazeer et al. 2017, arXiv 1701.06538), and the layer itself.

No token is dropped and nothing is padded: the copies of tokens are sorted by expert, each expert multiplies its segment
(MegaBlocks, arXiv 2211.15841), and a token sums what its experts returned. The weight of a choice multiplies at the
expert, before the last matrix: the result is the same, and the expert's outputs need not be kept for backward
(`segments` multiplies them where they are narrower).
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
from .permutation import copied, counted, inverse, permuted, summed
from .router import Router, Routing
from .segments import segmented

#: What is computed while tokens are on their way to experts of other ranks.
Meanwhile = Callable[[], Tensor | None]
#: (x [n, hidden], routing, experts, meanwhile) -> [n, hidden], and what `meanwhile` returns
Dispatch = Callable[[Tensor, Routing, "Experts", Meanwhile], tuple[Tensor, Tensor | None]]
#: (x [b, s, hidden], routing of its tokens) -> the same of the tokens that this rank's experts shall see
Enter = Callable[[Tensor, Routing], tuple[Tensor, Routing]]
#: Terms of the loss.
BALANCE, Z = "expert_balance", "router_z"


class GroupedLinear(nn.Module):
    """x [n, in] in segments that end at `ends` int32 [experts] -> [n, out]: a segment times its own matrix [out, in],
    all in one kernel of a GPU."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


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
        if not (x.is_cuda and x.dtype == torch.bfloat16):  # what the kernel of `GroupedLinear` is for
            gate = None if self.gate is None else self.gate.weight
            return segmented(x, weights, counts.tolist(), gate, self.up.weight, self.down.weight, self.activation)
        ends = counts.cumsum(0).to(torch.int32)
        up, activation = self.up(x, ends), self.activation
        inner = ACTIVATIONS[activation](up) if self.gate is None else gated(self.gate(x, ends), up, activation)
        return self.down((inner * weights[:, None]).to(x.dtype), ends)


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
    token: Tensor  # int64 [n * k]: which token each copy is of
    places: Tensor  # int64 [n, k]: where the copy for each choice is

    @classmethod
    def of(cls, x: Tensor, routing: Routing, experts: int) -> Copies:
        """Of tokens [n, hidden] for a layer of so many experts."""
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        token, places = order // routing.experts.shape[-1], inverse(order)
        weights = permuted(routing.weights.flatten(), order, places)
        places = places.view_as(routing.experts)
        return cls(copied(x, token, places), weights, counted(chosen, experts), token, places)

    def summed(self, out: Tensor) -> Tensor:
        """What experts returned for the copies, [n * k, hidden], summed over each token's -> [n, hidden]."""
        return summed(out, self.token, self.places)


def dispatch(x: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> tuple[Tensor, Tensor | None]:
    """All experts on this rank."""
    copies = Copies.of(x, routing, experts.count)
    return copies.summed(experts(copies.rows, copies.counts, copies.weights)), meanwhile()


def nothing() -> None:
    """A `Meanwhile`."""
