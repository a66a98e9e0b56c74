"""The experts of one layer (a mixture of experts, Shazeer et al. 2017, arXiv 1701.06538), and the
layer itself.

Nothing is padded, and without `moe.capacity_factor` no token is dropped: copies of tokens are
sorted by expert, each expert multiplies its segment (MegaBlocks, arXiv 2211.15841), and a token
sums what its experts returned. The weight of a choice multiplies at the expert, before the last
matrix: the result is the same, and the expert's outputs need not be kept for backward (`segments`
multiplies them where they are narrower).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec import UNSET
from torch import Tensor, nn

from orchestrator.plan.document import Model, Moe
from orchestrator.plan.expert_capacity import expert_capacity

from .balance import batch_balance, sequence_balance, z_sum
from .capacity import first_choices
from .linear import identities
from .loss import LossTerms
from .mlp import ACTIVATIONS, MLP, gated
from .permutation import Places, copied, counted, counted_by_row, inverse, permuted, summed
from .router import Router, Routing
from .segments import segmented

#: What is computed while tokens are on their way to experts of other ranks.
Meanwhile = Callable[[], Tensor | None]
#: (x [n, hidden], routing, experts, meanwhile) -> [n, hidden], and what `meanwhile` returns
Dispatch = Callable[[Tensor, Routing, "Experts", Meanwhile], tuple[Tensor, Tensor | None]]
#: (x [b, s, hidden], routing of its tokens) -> the same of the tokens that this rank's experts
#: shall see
Enter = Callable[[Tensor, Routing], tuple[Tensor, Routing]]
#: (rows [b, s, k] of this rank's tokens, a function of those of whole sequences) -> what it returns
#: for this rank's
OfSequences = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
#: Terms of the loss.
BALANCE = "expert_balance"
Z = "router_z"


class GroupedLinear(nn.Module):
    """x [n, in] in segments that end at `ends` int32 [experts] -> [n, out]: a segment times its own
    matrix [out, in], all in one kernel of a GPU."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


class Experts(nn.Module):
    """Rows sorted by expert [n, hidden], `counts` int64 [experts], `weights` [n] -> weighted
    outputs [n, hidden]."""

    def __init__(self, model: Model, moe: Moe):
        super().__init__()
        shape = moe.experts, model.hidden, moe.ffn_hidden
        self.gate = GroupedLinear(*shape) if model.mlp == "gated" else None
        self.up = GroupedLinear(*shape)
        self.down = GroupedLinear(moe.experts, moe.ffn_hidden, model.hidden)
        self.activation = model.activation
        self.in_one_kernel = False  # as on a GPU, wherever tensors are

    @property
    def count(self) -> int:
        """Experts on this rank."""
        return self.up.weight.shape[0]

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        if (
            not (self.in_one_kernel or x.is_cuda) or x.dtype != torch.bfloat16
        ):  # what `GroupedLinear`'s kernel is for
            gate = None if self.gate is None else self.gate.weight
            return segmented(
                x, weights, counts.tolist(), gate, self.up.weight, self.down.weight, self.activation
            )
        ends = counts.cumsum(0).to(torch.int32)
        up = self.up(x, ends)
        activation = self.activation
        inner = (
            ACTIVATIONS[activation](up)
            if self.gate is None
            else gated(self.gate(x, ends), up, activation)
        )
        return self.down((inner * weights[:, None]).to(x.dtype), ends)


class MixtureOfExperts(nn.Module):
    """[b, s, hidden], and numbers of its tokens [b, s] -> [b, s, hidden]: stands in a block where a
    dense layer has its MLP.

    `enter`, `sum_counts`, `of_sequences`, `dispatch`, `shared_in` and `shared_out` are replaceable:
    parallelism puts its communication there. `terms`, where they are set, get the terms that
    balance the experts.
    """

    def __init__(self, model: Model, moe: Moe):
        super().__init__()
        self.router = Router(model, moe)
        self.experts = Experts(model, moe)
        self.shared = MLP(model, moe.shared_ffn_hidden) if moe.shared_ffn_hidden else None
        self.out_bias = None
        self.enter: Enter = _enter
        self.shared_in, self.shared_out = identities(2)
        self.dispatch: Dispatch = dispatch
        # Over ranks that hold parts of the same sequences:
        self.sum_counts: Callable[[Tensor], Tensor] = _alone
        self.of_sequences: OfSequences = _of_whole
        self.terms: LossTerms | None = None

    def forward(self, x: Tensor, token_index: Tensor | None = None) -> Tensor:
        routing = self.router(
            x.flatten(0, -2), None if token_index is None else token_index.flatten()
        )
        if self.terms is not None:
            x = self._add_terms(x, routing, self.terms)
        if self.router.moe.capacity_factor is not UNSET:
            routing = self._drop(routing, len(x))
        x, routing = self.enter(x, routing)

        def shared() -> Tensor | None:
            return None if self.shared is None else self.shared_out(self.shared(self.shared_in(x)))

        out, shared_out = self.dispatch(x.flatten(0, -2), routing, self.experts, shared)
        return out.view_as(x) if shared_out is None else out.view_as(x) + shared_out

    def _add_terms(self, x: Tensor, routing: Routing, terms: LossTerms) -> Tensor:
        moe = self.router.moe
        if self.router.load is not None:
            x = terms.add(
                BALANCE,
                x,
                moe.balance_loss * batch_balance(routing, self.router.load),
                divisor=terms.tokens,
            )
        elif moe.balance_loss:
            chosen = routing.experts.reshape(len(x), -1)
            counts = self.sum_counts(counted_by_row(chosen, moe.experts))
            x = terms.add(
                BALANCE,
                x,
                moe.balance_loss * sequence_balance(routing, counts),
                divisor=terms.samples,
            )
        if moe.z_loss:
            x = terms.add(Z, x, moe.z_loss * z_sum(routing), divisor=terms.tokens)
        return x

    def _drop(self, routing: Routing, sequences: int) -> Routing:
        """Each expert takes its first tokens of each sequence."""
        moe = self.router.moe
        chosen = routing.experts.view(sequences, -1, self.router.moe.top_k)

        def choose_first(chosen: Tensor) -> Tensor:
            capacity = expert_capacity(moe, chosen.shape[1])
            assert capacity is not None, "else nothing is dropped"
            return first_choices(chosen, moe.experts, capacity)

        return routing._replace(accepted=self.of_sequences(chosen, choose_first).flatten(0, 1))


def term_names(model: Model) -> list[str]:
    """The terms that a model's experts add to the loss."""
    moe = model.moe
    return (
        [name for name, weight in ((BALANCE, moe.balance_loss), (Z, moe.z_loss)) if weight]
        if moe
        else []
    )


def _enter(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    return x, routing


def _alone(counts: Tensor) -> Tensor:
    return counts


def _of_whole(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(rows)


class Copies(NamedTuple):
    """A copy of a token for each of its choices that is accepted, sorted by expert; m = n * k where
    all are."""

    rows: Tensor  # [m, hidden]
    weights: Tensor  # [m]
    counts: Tensor  # int64 [experts of the layer]
    token: Tensor  # int64 [m]: which token each copy is of
    places: Places  # where the copies of each token are

    @classmethod
    def of(cls, x: Tensor, routing: Routing, experts: int) -> Copies:
        """Of tokens [n, hidden] for a layer of so many experts."""
        chosen = routing.experts.flatten()
        accepted = routing.accepted
        if accepted is not None:
            chosen = chosen.masked_fill(
                ~accepted.flatten(), experts
            )  # dropped ones go behind the last expert
        order = chosen.argsort(stable=True)
        position = inverse(order)
        weights = permuted(routing.weights.flatten(), order, position)
        if accepted is None:
            positions = Places(position.view_as(routing.experts))
            counts = counted(chosen, experts)
        else:
            positions = Places.unequal(position[accepted.flatten()], accepted.sum(-1))
            counts = counted(chosen, experts + 1)[:-1]
            weights = weights[: len(positions.of_copies)]
            order = order[: len(positions.of_copies)]
        token = order // routing.experts.shape[-1]
        return cls(copied(x, token, positions), weights, counts, token, positions)

    def summed(self, out: Tensor) -> Tensor:
        """What experts returned for the copies, [m, hidden], summed over each token's -> [n,
        hidden]."""
        return summed(out, self.token, self.places)


def dispatch(
    x: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile
) -> tuple[Tensor, Tensor | None]:
    """All experts on this rank."""
    copies = Copies.of(x, routing, experts.count)
    return copies.summed(experts(copies.rows, copies.counts, copies.weights)), meanwhile()


def nothing() -> None:
    """A `Meanwhile`."""
