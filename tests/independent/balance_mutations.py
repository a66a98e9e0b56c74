"""Seeded bugs of what balances experts, of latent attention and of further predictions, for the
independent oracle."""

from __future__ import annotations

from dataclasses import replace

import torch

import trainer.engine as engine
import trainer.model.experts as experts
import trainer.model.mla as mla
import trainer.model.prediction as prediction
import trainer.model.rope as rope
import trainer.model.stage as stage
import trainer.parallel.expert.choice_states as choice_states
import trainer.parallel.expert.load as load
from tests.mutations.base import after
from trainer.data.batch import IGNORED
from trainer.model.balance import sequence_balance

from .expert_mutations import MIXTRAL, QWEN3, V2, adder
from .mutations import Mutation

MUTATIONS: list[Mutation] = []
mutation = adder(MUTATIONS)

# ------------------------------------------------------------------------------------------------
#     terms and biases


@mutation("the balance is that of the batch, not of each sequence", "term expert_balance", MIXTRAL)
def _(patch):
    def of_batch(routing, counts):
        batch_counts = counts.sum(0, keepdim=True).expand_as(counts) / len(counts)
        return sequence_balance(routing, batch_counts)

    patch.setattr(experts, "sequence_balance", of_batch)


@mutation("the balance's gradient is that of one rank of two", "gradient", MIXTRAL)
def _(patch):
    attach = experts.LossTerms.add

    def half(self, name, x, value, divisor=None):
        grown = attach(self, name, x, value, divisor)
        return grown if name != "expert_balance" else grown + (value - value.detach()) * 1e-3

    patch.setattr(experts.LossTerms, "add", half)


@mutation(
    "the z-loss is a mean over the tokens that count",
    "term router_z",
    MIXTRAL,
    "fp32",
    ("ep2", "dp2"),
)
def _(patch):
    start = experts.LossTerms.start

    def valid(self, scale, valid_tokens, micro_batches, samples, tokens):
        start(self, scale, valid_tokens, micro_batches, samples, valid_tokens)

    patch.setattr(experts.LossTerms, "start", valid)


@mutation("the biases move by the choices of one rank", "bias", first=True)
def _(patch):
    patch.setattr(choice_states, "sum_over_ranks", lambda rows, *rest: torch.stack(rows))


@mutation("the biases move away from an equal load", "bias")
def _(patch):
    change = choice_states.bias_change
    patch.setattr(choice_states, "bias_change", lambda chosen, speed: -change(chosen, speed))


@mutation("the biases move in steps that are skipped", "bias", precision="fp16")
def _(patch):
    apply_states = choice_states.ChoiceStates.apply

    def always(self, finite, *rest):
        apply_states(self, torch.ones_like(finite), *rest)

    patch.setattr(choice_states.ChoiceStates, "apply", always)


@mutation("a resumed run has lost the biases", "bias")
def _(patch):
    def lost(self, step, scalars):
        for _, tensor in self.part.states():
            tensor.zero_()

    after(patch, engine.Engine, "resumed", lost)


@mutation("the balanced load is that of one rank", "load", QWEN3)
def _(patch):
    patch.setattr(choice_states, "sum_over_ranks", lambda rows, *rest: torch.stack(rows))


@mutation("the balanced load is the one before the last", "load", QWEN3)
def _(patch):
    patch.setattr(choice_states, "load_of", lambda chosen: torch.ones(chosen.shape))


@mutation("the term of the whole batch is one of each sequence", "gradient", QWEN3)
def _(patch):
    patch.setattr(experts, "batch_balance", lambda routing, load: routing.scores.sum())


@mutation("the reported load is that of one rank", "tokens", QWEN3)
def _(patch):
    patch.setattr(load, "sum_over_ranks", lambda rows, *rest: torch.stack(rows))


# ------------------------------------------------------------------------------- latent attention
#     and positions


@mutation("attention's scores do not grow with stretched positions", "loss")
def _(patch):
    patch.setattr(mla, "attention_scale", lambda model: 1.0)


@mutation("positions are not stretched", "loss")
def _(patch):
    patch.setattr(
        rope, "_stretch", lambda yarn, size, *_: torch.ones(size // 2, dtype=torch.float64)
    )


@mutation("fast dimensions are slowed down, and not slow ones", "loss")
def _(patch):
    stretch = rope._stretch
    patch.setattr(rope, "_stretch", lambda *args: stretch(*args).flip(0))


@mutation("the rotary part turns neighbours together", "gradient", V2)
def _(patch):
    turn = mla.rotate

    def pairs(x, tables):
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        turned = turn(halves, tables)
        low, high = turned.chunk(2, -1)
        return torch.stack([low, high], -1).flatten(-2)

    patch.setattr(mla, "rotate", pairs)


@mutation("the key that heads share is not turned", "loss")
def _(patch):
    turn = mla.rotate
    patch.setattr(mla, "rotate", lambda x, tables: x if x.shape[2] == 1 else turn(x, tables))


@mutation("the latent of keys and values is not normalised", "gradient", V2)
def _(patch):
    norm = mla.RMSNorm.forward
    patch.setattr(
        mla.RMSNorm,
        "forward",
        lambda self, x: x * self.weight if x.shape[-1] == 20 else norm(self, x),
    )


# ----------------------------------------------------------------------------------------------
#     further predictions


@mutation("modules predict a token too far", "term mtp", first=True)
def _(patch):
    ahead = engine.look_ahead

    def further(batch, depth):
        shifted = ahead(batch, depth + 1)
        return replace(
            shifted,
            next_tokens=shifted.next_tokens[..., 1:],
            next_targets=shifted.next_targets[..., 1:],
        )

    patch.setattr(engine, "look_ahead", further)


@mutation("modules predict across documents", "term mtp")
def _(patch):
    ahead = engine.look_ahead
    patch.setattr(
        engine,
        "look_ahead",
        lambda batch, depth: replace(
            ahead(replace(batch, documents=None), depth), documents=batch.documents
        ),
    )


@mutation("the losses of the depths are summed, not averaged", "term mtp")
def _(patch):
    original = stage.prediction_loss
    patch.setattr(stage, "prediction_loss", lambda mtp, *rest: original(mtp, *rest) * mtp.depth)


@mutation("every depth reads the model's own state", "term mtp")
def _(patch):
    original = stage.prediction_loss

    def same(mtp, x, targets, step, loss):
        return original(mtp, x, targets, lambda k, state: step(k, x), loss)

    patch.setattr(stage, "prediction_loss", same)


@mutation("the state and the token are exchanged", "term mtp", V2)
def _(patch):
    forward = prediction.PredictionBlock.forward
    patch.setattr(
        prediction.PredictionBlock,
        "forward",
        lambda self, x, token, *rest, **kwargs: forward(self, token, x, *rest, **kwargs),
    )


@mutation("modules learn from targets that do not count", "term mtp")
def _(patch):
    ahead = engine.look_ahead

    def all_count(batch, depth):
        shifted = ahead(batch, depth)
        goals = torch.where(
            shifted.next_targets == IGNORED, shifted.next_tokens, shifted.next_targets
        )
        return replace(shifted, next_targets=goals)

    patch.setattr(engine, "look_ahead", all_count)
