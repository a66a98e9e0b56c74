"""Bugs of experts: their exchange, their gradients, their routers and the terms that balance
them."""

from __future__ import annotations

from functools import partial

import torch
from msgspec import structs

import trainer.comm.mesh as mesh
import trainer.model.experts as layer
import trainer.parallel.apply as apply
import trainer.parallel.expert.capacity as bounded
import trainer.parallel.expert.choice_states as choice_states
import trainer.parallel.expert.dispatch as exchange
from orchestrator.verify.expert_models import CAPPED, CAPPED_DEEPSEEK, DEEPSEEK, MIXTURE
from tests.beds.plans import tiny_model
from trainer.model.experts import Copies, MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.parallel.expert.capacity import WholeSequences
from trainer.parallel.expert.choice_states import ChoiceStates
from trainer.parallel.expert.dispatch import ExpertDispatch
from trainer.parallel.expert.tensor_parallel import GatheredTokens, ReplicatedTokens, SequenceCounts

from .base import Mutations

EXPERTS = Mutations()
MIXED = tiny_model(**MIXTURE)
SHARED = tiny_model(**DEEPSEEK)
BOUNDED = tiny_model(**CAPPED)
BOUNDED_SHARED = tiny_model(**CAPPED_DEEPSEEK)
BALANCED = tiny_model(**(MIXTURE | {"moe": structs.replace(MIXTURE["moe"], balance_over="batch")}))


def _alone():
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _layers(patch, change):
    """`change(mixture)` on every layer of experts that a rank holds, not on those of one
    process."""
    original = apply.apply_to_experts

    def both(stage, mesh, **rest):
        original(stage, mesh, **rest)
        for block in stage.blocks.values():
            if isinstance(block.mlp, MixtureOfExperts) and not _alone():
                change(block.mlp)

    patch.setattr(apply, "apply_to_experts", both)


def _routing(patch, change):
    """`change(routing, experts of a rank)` -> the routing that the exchange sees instead."""
    original = ExpertDispatch.__call__
    patch.setattr(
        ExpertDispatch,
        "__call__",
        lambda self, x, r, experts, extra_weights: original(
            self, x, change(r, experts.count), experts, extra_weights
        ),
    )


def _weigh(patch, **factors):
    """A layer's terms count by other factors."""

    def change(mixture):
        moe = mixture.router.moe
        mixture.router.moe = structs.replace(
            moe, **{name: getattr(moe, name) * by for name, by in factors.items()}
        )

    _layers(patch, change)


def _groups(patch, name, members):
    """`members(plan, rank)` are the ranks of the group `name` of experts."""
    original = mesh._of_experts
    patch.setattr(
        mesh,
        "_of_experts",
        lambda plan, n, rank: members(plan, rank) if n == name else original(plan, n, rank),
    )


def _backward(patch, change):
    for step in (exchange._Moved, exchange._Started):
        original = step.backward
        patch.setattr(step, "backward", staticmethod(partial(_changed, original, change)))


def _changed(original, change, ctx, grad):
    gradients = list(original(ctx, grad))
    first = next(
        index for index, gradient in enumerate(gradients) if gradient is not None
    )  # of the rows
    gradients[first] = change(gradients[first])
    return tuple(gradients)


@EXPERTS("experts: gradients are divided by ep", ep=2, model=MIXED)
def _(patch):
    _backward(patch, lambda grad: grad / 2)


@EXPERTS("experts: gradients arrive in fp32", ep=2, model=MIXED)
def _(patch):
    _backward(patch, lambda grad: grad.float().to(grad.dtype))


@EXPERTS("experts: gradients come back one place shifted", ep=2, model=MIXED)
def _(patch):
    _backward(patch, lambda grad: grad.roll(1, 0))


@EXPERTS("experts: gradients are summed over the dense group", ep=2, dp=2, model=MIXED)
def _(patch):
    _groups(
        patch,
        "expert_grad",
        lambda plan, rank: next(tuple(g) for g in plan.groups["grad"] if rank in g),
    )


@EXPERTS("experts: gradients are not summed over dp", ep=2, dp=2, model=MIXED)
def _(patch):
    _groups(patch, "expert_grad", lambda plan, rank: (rank,))


@EXPERTS("experts: the norm counts those of one rank", ep=2, model=MIXED)
def _(patch):
    _groups(patch, "expert_model", lambda plan, rank: (rank,))


@EXPERTS("experts: weights of choices are not differentiated", ep=2, model=MIXED)
def _(patch):
    _routing(patch, lambda r, count: r._replace(weights=r.weights.detach()))


@EXPERTS("experts: weights of choices travel in bf16", ep=2, model=MIXED)
def _(patch):
    _routing(patch, lambda r, count: r._replace(weights=r.weights.bfloat16().to(r.weights.dtype)))


@EXPERTS("experts: the first choice gets the second one's weight", ep=2, model=MIXED)
def _(patch):
    _routing(patch, lambda r, count: r._replace(weights=r.weights.flip(-1)))


@EXPERTS("experts: a second choice on the same rank is lost", ep=2, model=MIXED)
def _(patch):
    def change(routing, count):
        ranks = routing.experts // count
        again = (ranks[:, 1:] == ranks[:, :1]).any(-1)
        weights = torch.cat([routing.weights[:, :1], routing.weights[:, 1:] * ~again[:, None]], -1)
        return routing._replace(weights=weights)

    _routing(patch, change)


@EXPERTS("experts: the last token's copies are dropped", ep=2, model=MIXED)
def _(patch):
    def change(routing, count):
        keep_mask = torch.ones_like(routing.weights)
        keep_mask[-1] = 0
        return routing._replace(weights=routing.weights * keep_mask)

    _routing(patch, change)


@EXPERTS("experts: runs of the senders are swapped", ep=2, model=MIXED)
def _(patch):
    original = ExpertDispatch._to_experts

    def swapped(self, counts, group):
        move, arriving = original(self, counts, group)
        return move, arriving.flip(0)

    patch.setattr(ExpertDispatch, "_to_experts", swapped)


@EXPERTS("experts: results come back one place shifted", ep=2, model=MIXED)
def _(patch):
    class Shifted(Copies):
        def summed(self, out):
            return super().summed(out.roll(1, 0))

    patch.setattr(exchange, "Copies", Shifted)


@EXPERTS("experts: slices' results are not summed over tp", ep=2, tp=2, model=MIXED)
def _(patch):
    def own(rows, sizes, group, *rest):
        return rows.split(sizes)[group.rank()].contiguous()

    patch.setattr(exchange, "reduce_scatter_uneven", own)


@EXPERTS("experts: recomputation routes differently", ep=2, recompute="full", model=MIXED)
def _(patch):
    def change(mixture):
        def hook(router, args, routing):
            forward = mixture.terms.counts
            return routing if forward else routing._replace(weights=routing.weights.flip(-1))

        mixture.router.register_forward_hook(hook)

    _layers(patch, change)


@EXPERTS("experts: the balance term is scaled by ep", ep=2, model=MIXED)
def _(patch):
    _weigh(patch, balance_loss=2)


@EXPERTS("experts: the z term is divided by ep", ep=2, model=MIXED)
def _(patch):
    _weigh(patch, z_loss=0.5)


@EXPERTS("experts: the balance term is divided by the rank's own sequences", ep=2, model=MIXED)
def _(patch):
    original = LossTerms.start

    def start(self, scale, valid, micro_batches, samples, tokens):
        original(self, scale, valid, micro_batches, samples if _alone() else samples // 2, tokens)

    patch.setattr(LossTerms, "start", start)


@EXPERTS("experts: choices are counted in a part of the sequence (cp)", cp=2, model=MIXED)
@EXPERTS("experts: choices are counted in a part of the sequence (sp)", ep=2, tp=2, model=MIXED)
def _(patch):
    patch.setattr(SequenceCounts, "__call__", lambda self, counts: counts)


@EXPERTS(
    "experts: gradients of weights of choices are not summed over tp", tp=2, sp=False, model=MIXED
)
def _(patch):
    original = ReplicatedTokens.__call__

    def call(self, x, routing):
        return original(self, x, routing)[0], routing

    patch.setattr(ReplicatedTokens, "__call__", call)


@EXPERTS("experts: gradients of tokens are not summed over tp", tp=2, sp=False, model=MIXED)
def _(patch):
    original = ReplicatedTokens.__call__

    def call(self, x, routing):
        return x, original(self, x, routing)[1]

    patch.setattr(ReplicatedTokens, "__call__", call)


@EXPERTS("experts: tokens of all ranks get the routing of another's", tp=2, model=MIXED)
def _(patch):
    original = GatheredTokens.__call__

    def call(self, x, routing):
        x, routing = original(self, x, routing)
        return x, routing._replace(experts=routing.experts.roll(1, 0))

    patch.setattr(GatheredTokens, "__call__", call)


@EXPERTS("experts: shared ones count twice", ep=2, model=SHARED)
def _(patch):
    def change(mixture):
        if mixture.shared is not None:
            mixture.shared.register_forward_hook(lambda module, args, out: 2 * out)

    _layers(patch, change)


def _counts(patch, change):
    """`change(counts of a step over all ranks, those of this rank alone)` -> those that move the
    biases."""
    original = choice_states.sum_over_ranks
    patch.setattr(
        choice_states,
        "sum_over_ranks",
        lambda rows, *where: change(original(rows, *where), torch.stack(rows)),
    )


@EXPERTS("experts: biases are moved by a rank's own counts", ep=2, model=SHARED)
@EXPERTS("experts: biases are moved by the counts of a part of the sequence", tp=2, model=SHARED)
def _(patch):
    _counts(patch, lambda counts, own_counts: own_counts)


@EXPERTS("experts: the load is that of a rank's own choices", ep=2, model=BALANCED)
def _(patch):
    _counts(patch, lambda counts, own_counts: own_counts)


@EXPERTS("experts: the load stays that of the beginning", ep=2, model=BALANCED)
def _(patch):
    patch.setattr(
        choice_states, "load_of", lambda counts: torch.ones_like(counts, dtype=torch.float32)
    )


@EXPERTS(
    "experts: the balance of the batch counts each sequence as one token", ep=2, model=BALANCED
)
def _(patch):
    original = LossTerms.start

    def start(self, scale, valid, micro_batches, samples, tokens):
        original(self, scale, valid, micro_batches, samples, tokens if _alone() else samples)

    patch.setattr(LossTerms, "start", start)


@EXPERTS("experts: biases count padding", dp=2, zero=2, replica_micro_batches=[2, 1], model=SHARED)
def _(patch):
    patch.setattr(LossTerms, "counts", property(lambda self: True))


@EXPERTS("experts: biases move the other way", ep=2, model=SHARED)
def _(patch):
    original = choice_states.bias_change
    patch.setattr(choice_states, "bias_change", lambda counts, speed: original(counts, -speed))


@EXPERTS("experts: biases keep the counts of all steps", ep=2, model=SHARED)
def _(patch):
    patch.setattr(ChoiceStates, "start", lambda self: None)


@EXPERTS("experts: the bias weighs", ep=2, model=SHARED)
def _(patch):
    def change(mixture):
        def hook(router, args, routing):
            return routing._replace(weights=routing.weights + 2.5 * router.bias[routing.experts])

        if mixture.router.bias is not None:
            mixture.router.register_forward_hook(hook)

    _layers(patch, change)


def _taken(patch, change):
    """`change(whole choices, experts, capacity, what experts take of them)` on ranks, not in one
    process."""
    original = layer.first_choices

    def other(chosen, experts, capacity):
        taken_choices = original(chosen, experts, capacity)
        return taken_choices if _alone() else change(chosen, experts, capacity, taken_choices)

    patch.setattr(layer, "first_choices", other)


@EXPERTS("experts: the mask of dropped choices is shifted by a token", ep=2, model=BOUNDED)
def _(patch):
    _taken(patch, lambda chosen, experts, capacity, taken_choices: taken_choices.roll(1, 1))


@EXPERTS("experts: the last tokens of a sequence are taken, not the first", ep=2, model=BOUNDED)
def _(patch):
    original = layer.first_choices
    _taken(patch, lambda chosen, *bound: original(chosen.flip(1), *bound[:2]).flip(1))


@EXPERTS("experts: the bound is one token too high", ep=2, model=BOUNDED)
def _(patch):
    original = layer.first_choices
    _taken(
        patch,
        lambda chosen, experts, capacity, taken_choices: original(chosen, experts, capacity + 1),
    )


@EXPERTS("experts: nothing is dropped", ep=2, model=BOUNDED)
def _(patch):
    _taken(patch, lambda chosen, experts, capacity, taken_choices: torch.ones_like(taken_choices))


@EXPERTS(
    "experts: the bound is of a micro-batch, not of each sequence",
    ep=2,
    micro_batch_size=2,
    model=BOUNDED,
)
def _(patch):
    original = layer.first_choices

    def whole(chosen, experts, capacity, taken_choices):
        return original(chosen.flatten(0, 1)[None], experts, len(chosen) * capacity).view_as(
            taken_choices
        )

    _taken(patch, whole)


@EXPERTS("experts: each rank bounds its own part of a sequence (cp)", cp=2, model=BOUNDED)
@EXPERTS("experts: each rank bounds its own part of a sequence (sp)", tp=2, model=BOUNDED)
def _(patch):
    patch.setattr(WholeSequences, "__call__", lambda self, rows, function: function(rows))


@EXPERTS("experts: sequences are put together in the order of ranks (zig-zag)", cp=2, model=BOUNDED)
def _(patch):
    patch.setattr(bounded, "natural_order", lambda method, seq_len, size: list(range(seq_len)))


@EXPERTS("experts: weights of taken choices are normalised anew", ep=2, model=BOUNDED)
def _(patch):
    original = Copies.of.__func__

    def of(cls, x, routing, experts):
        if routing.accepted is not None and not _alone():
            weights = routing.weights * routing.accepted
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)
            routing = routing._replace(weights=weights)
        return original(cls, x, routing, experts)

    patch.setattr(Copies, "of", classmethod(of))


@EXPERTS(
    "experts: biases count what experts take, not what tokens choose", ep=2, model=BOUNDED_SHARED
)
def _(patch):
    def count(self, number, routing):
        row = self._chosen.setdefault(number, self._empty(self.mixtures[number]))
        row += torch.bincount(routing.experts[routing.accepted], minlength=len(row))

    patch.setattr(ChoiceStates, "_count", count)


@EXPERTS(
    "experts: the balance counts what experts take, not what tokens choose", ep=2, model=BOUNDED
)
def _(patch):
    original = MixtureOfExperts._add_terms

    def add(self, x, routing, terms):
        routing = self._drop(routing, len(x))
        lost = routing._replace(
            experts=torch.where(routing.accepted, routing.experts, routing.experts[:, :1])
        )
        return original(self, x, routing if _alone() else lost, terms)

    patch.setattr(MixtureOfExperts, "_add_terms", add)
