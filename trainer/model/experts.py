"""The experts of one layer (a mixture of experts, Shazeer et al. 2017, arXiv 1701.06538), and the
layer itself.

Nothing is padded, and without `moe.capacity_factor` no token is dropped: copies of tokens are
sorted by expert, each expert multiplies its segment (MegaBlocks, arXiv 2211.15841), and the results
are summed per token. The expert multiplies by the weight of a choice before its last matrix: the
result is the same, and its outputs need not be kept for backward (`segments` multiplies the outputs
where they are narrower).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
from .permutation import (
    CopyPositions,
    copied,
    counted,
    counted_by_row,
    inverse,
    permuted,
    read_counts,
    summed,
)
from .router import Router, Routing
from .segments import segmented

#: (x [n, in] sorted by expert, weight [experts, out, in], rows of each expert) -> [n, out]
GroupedOp = Callable[[Tensor, Tensor, list[int]], Tensor]
#: A computation that overlaps with the transfer of tokens to experts of other ranks.
Meanwhile = Callable[[], Tensor | None]
#: (x [n, hidden], routing, experts, meanwhile) -> [n, hidden], and the result of `meanwhile`
Dispatch = Callable[[Tensor, Routing, "Experts", Meanwhile], tuple[Tensor, Tensor | None]]
#: (x [b, s, hidden], routing of its tokens) -> x and routing of the tokens that this rank's experts
#: compute
Enter = Callable[[Tensor, Routing], tuple[Tensor, Routing]]
#: (rows [b, s, k] of this rank's tokens, a function of rows of whole sequences) -> the function's
#: result for this rank's tokens
OfSequences = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
#: Names of terms of the loss.
BALANCE = "expert_balance"
Z = "router_z"


class GroupedLinear(nn.Module):
    """x [n, in] in one segment per expert -> [n, out]: each segment times its own matrix [out, in].
    `op` computes it from the segments' sizes; without one it is a kernel of a GPU, which reads
    where they end."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.op: GroupedOp | None = None

    def segments(self, counts: Tensor) -> Tensor | list[int]:
        """`counts` int64 [experts] -> the `segments` of `forward`."""
        return counts.cumsum(0).to(torch.int32) if self.op is None else read_counts(counts)

    def forward(self, x: Tensor, segments: Any) -> Tensor:
        if self.op is not None:
            return self.op(x, self.weight, segments)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=segments)


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
        self.in_one_kernel = False  # whether to use the GPU's kernel on any device

    @property
    def count(self) -> int:
        """The number of experts on this rank."""
        return self.up.weight.shape[0]

    def _fits_kernel(self, x: Tensor) -> bool:
        """Checks whether one kernel can multiply all segments: in bfloat16, and with rows of whole
        16 bytes, which narrow slices of experts may not have."""
        on_device = self.in_one_kernel or x.is_cuda
        widths = self.up.weight.shape[1:]
        fits = all(width * x.itemsize % 16 == 0 for width in widths)
        return on_device and x.dtype == torch.bfloat16 and fits

    def forward(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        if self.up.op is None and not self._fits_kernel(x):
            return segmented(
                x,
                weights,
                read_counts(counts),
                gate=None if self.gate is None else self.gate.weight,
                up=self.up.weight,
                down=self.down.weight,
                activation=self.activation,
            )
        segments = self.up.segments(counts)
        up = self.up(x, segments)
        if self.gate is None:
            inner = ACTIVATIONS[self.activation](up)
        else:
            inner = gated(self.gate(x, segments), up, self.activation)
        return self.down((inner * weights[:, None]).to(x.dtype), segments)


class MixtureOfExperts(nn.Module):
    """[b, s, hidden], and numbers of its tokens [b, s] -> [b, s, hidden]: replaces the MLP of a
    dense layer.

    Parallelism replaces `enter`, `sum_counts`, `of_sequences`, `dispatch`, `shared_in` and
    `shared_out` by its communication. If `terms` is set, the layer adds the terms that balance its
    experts.
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
        # Replaced where several ranks hold parts of the same sequences:
        self.sum_counts: Callable[[Tensor], Tensor] = _alone
        self.of_sequences: OfSequences = _of_whole
        self.terms: LossTerms | None = None

    def forward(self, x: Tensor, token_index: Tensor | None = None) -> Tensor:
        routing = self.router(
            x.flatten(0, -2),
            None if token_index is None else token_index.flatten(),
        )
        if self.terms is not None:
            x = self._add_terms(x, routing, self.terms)
        if self.router.moe.capacity_factor is not UNSET:
            routing = self._drop(routing, len(x))
        x, routing = self.enter(x, routing)

        def shared() -> Tensor | None:
            return None if self.shared is None else self.shared_out(self.shared(self.shared_in(x)))

        out, shared_out = self.dispatch(
            x.flatten(0, -2),
            routing,
            self.experts,
            shared,
        )
        return out.view_as(x) if shared_out is None else out.view_as(x) + shared_out

    def _add_terms(self, x: Tensor, routing: Routing, terms: LossTerms) -> Tensor:
        moe = self.router.moe
        if self.router.load is not None:
            balance = moe.balance_loss * batch_balance(routing, self.router.load)
            x = terms.add(BALANCE, x, balance, divisor=terms.tokens)
        elif moe.balance_loss:
            chosen = routing.experts.reshape(len(x), -1)
            counts = self.sum_counts(counted_by_row(chosen, moe.experts))
            balance = moe.balance_loss * sequence_balance(routing, counts)
            x = terms.add(BALANCE, x, balance, divisor=terms.samples)
        if moe.z_loss:
            x = terms.add(
                Z,
                x,
                moe.z_loss * z_sum(routing),
                divisor=terms.tokens,
            )
        return x

    def _drop(self, routing: Routing, sequences: int) -> Routing:
        """Returns the routing in which each expert accepts its first tokens of each sequence."""
        moe = self.router.moe
        chosen = routing.experts.view(sequences, -1, self.router.moe.top_k)

        def choose_first(chosen: Tensor) -> Tensor:
            capacity = expert_capacity(moe, chosen.shape[1])
            assert capacity is not None, "else nothing is dropped"
            return first_choices(chosen, moe.experts, capacity)

        return routing._replace(accepted=self.of_sequences(chosen, choose_first).flatten(0, 1))


def term_names(model: Model) -> list[str]:
    """Returns the terms that a model's experts add to the loss."""
    moe = model.moe
    if not moe:
        return []
    weights = {BALANCE: moe.balance_loss, Z: moe.z_loss}
    return [name for name, weight in weights.items() if weight]


def _enter(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    return x, routing


def _alone(counts: Tensor) -> Tensor:
    return counts


def _of_whole(rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(rows)


class Copies(NamedTuple):
    """One copy of a token per accepted choice, sorted by expert; m = n * k if all are accepted."""

    rows: Tensor  # [m, hidden]
    weights: Tensor  # [m]
    counts: Tensor  # int64 [experts of the layer]
    token: Tensor  # int64 [m]: the token of each copy
    positions: CopyPositions  # those of each token's copies

    @classmethod
    def of(cls, x: Tensor, routing: Routing, experts: int) -> Copies:
        """Copies tokens [n, hidden] for a layer of `experts` experts."""
        chosen = routing.experts.flatten()
        accepted = routing.accepted
        if accepted is not None:  # dropped choices go behind the last expert
            chosen = chosen.masked_fill(~accepted.flatten(), experts)
        order = chosen.argsort(stable=True)
        position = inverse(order)
        weights = permuted(routing.weights.flatten(), order, position)
        if accepted is None:
            positions = CopyPositions(position.view_as(routing.experts))
            counts = counted(chosen, experts)
        else:
            counts = counted(chosen, experts + 1)[:-1]
            copies = sum(read_counts(counts))
            by_token = accepted.flatten().nonzero_static(size=copies)[:, 0]
            positions = CopyPositions.unequal(position[by_token], accepted.sum(-1))
            weights = weights[:copies]
            order = order[:copies]
        token = order // routing.experts.shape[-1]
        return cls(
            copied(x, token, positions),
            weights,
            counts,
            token,
            positions,
        )

    def summed(self, out: Tensor) -> Tensor:
        """Sums the experts' results for the copies, [m, hidden], per token -> [n, hidden]."""
        return summed(out, self.token, self.positions)


def dispatch(
    x: Tensor,
    routing: Routing,
    experts: Experts,
    meanwhile: Meanwhile,
) -> tuple[Tensor, Tensor | None]:
    """Computes a layer whose experts are all on this rank."""
    copies = Copies.of(x, routing, experts.count)
    return copies.summed(experts(copies.rows, copies.counts, copies.weights)), meanwhile()


def nothing() -> None:
    """Computes nothing, as a `Meanwhile`."""
