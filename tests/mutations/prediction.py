"""Bugs of multi-token prediction: which tokens, whose gradients, what weight."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from msgspec import structs

import trainer.engine as engine
import trainer.model.stage as stage
import trainer.parallel.apply as apply
from orchestrator.plan.document import Mtp
from tests.beds.plans import tiny_model
from trainer.data.batch import IGNORED
from trainer.model.loss import LossTerms
from trainer.model.stage import Stage

from .base import Mutations

PREDICTION = Mutations()
AHEAD = tiny_model(mtp=Mtp(depth=2, weight=0.4))


def _alone():
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def _looked(patch, change):
    """`change(batch)`, of every batch that a rank has looked ahead in."""
    original = engine.look_ahead
    patch.setattr(engine, "look_ahead", lambda batch, depth: change(original(batch, depth)))


def _loss(patch, change):
    """`change(mtp, step)` -> what takes their places in `prediction_loss`."""
    original = stage.prediction_loss

    def changed(mtp, x, targets, step, loss):
        mtp, step = (mtp, step) if _alone() else change(mtp, step)
        return original(mtp, x, targets, step, loss)

    patch.setattr(stage, "prediction_loss", changed)


@PREDICTION("prediction: targets are shifted by one more", pp=2, model=AHEAD)
def _(patch):
    def shifted(batch):
        return replace(
            batch, next_targets=F.pad(batch.next_targets[:, 1:], (0, 0, 0, 1), value=IGNORED)
        )

    _looked(patch, shifted)


@PREDICTION("prediction: reads the token that the model has read", dp=2, model=AHEAD)
def _(patch):
    _looked(
        patch,
        lambda batch: replace(
            batch, next_tokens=batch.tokens[..., None].expand_as(batch.next_tokens)
        ),
    )


@PREDICTION("prediction: targets of the next document count", dp=2, packed=True, model=AHEAD)
def _(patch):
    original = engine.look_ahead

    def whole(batch, depth):
        ahead = original(replace(batch, documents=None), depth)
        return replace(ahead, documents=batch.documents)

    patch.setattr(engine, "look_ahead", whole)


@PREDICTION(
    "prediction: tokens are shifted within a rank's part of the sequence", cp=2, model=AHEAD
)
def _(patch):
    original = engine.shard_batch
    look_ahead = engine.look_ahead
    patch.setattr(engine, "shard_batch", lambda batch, *cp: look_ahead(original(batch, *cp), 2))


@PREDICTION("prediction: the token table's gradients stay on the last stage", pp=2, model=AHEAD)
def _(patch):
    patch.setattr(apply, "embeds_at_both_ends", lambda model: False)


@PREDICTION("prediction: the output projection's gradients are not summed", dp=2, model=AHEAD)
def _(patch):
    ahead = Stage._look_ahead

    def look_ahead(self, *args):
        self.head.weight.requires_grad_(_alone())
        try:
            return ahead(self, *args)
        finally:
            self.head.weight.requires_grad_()

    patch.setattr(Stage, "_look_ahead", look_ahead)


@PREDICTION("prediction: the weight is ignored", tp=2, model=AHEAD)
def _(patch):
    _loss(patch, lambda mtp, step: (structs.replace(mtp, weight=1.0), step))


@PREDICTION("prediction: depths are summed", dp=2, zero=3, model=AHEAD)
def _(patch):
    _loss(patch, lambda mtp, step: (structs.replace(mtp, weight=mtp.weight * mtp.depth), step))


@PREDICTION(
    "prediction: the state of the depth before gets no gradient",
    pp=2,
    schedule="zb_h1",
    model=AHEAD,
)
def _(patch):
    _loss(patch, lambda mtp, step: (mtp, lambda k, state: step(k, state.detach())))


@PREDICTION("prediction: each tensor-parallel rank counts the term", tp=2, model=AHEAD)
def _(patch):
    original = LossTerms.declare
    patch.setattr(LossTerms, "declare", lambda self, *names, copies=1: original(self, *names))


@PREDICTION("prediction: norms are not summed over tp", tp=2, model=AHEAD)
def _(patch):
    original = apply.shard

    def alike(name, *args, **options):
        info = original(name, *args, **options)
        return replace(info, sums=()) if "norm_token" in name else info

    patch.setattr(apply, "shard", alike)
