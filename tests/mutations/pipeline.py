"""Bugs of pipelines."""

from __future__ import annotations

from dataclasses import replace

import trainer.comm.mesh as mesh
import trainer.parallel.apply as apply
import trainer.parallel.data.buckets as buckets
from tests.beds.plans import tiny_model
from trainer.pipeline.runtime import Pipeline
from trainer.pipeline.split import DeferredWeightGrads
from trainer.pipeline.transfer import Transfers

from .base import Mutations

PIPELINE = Mutations()
TIED = tiny_model(tied_embeddings=True)


@PIPELINE("tied embeddings: the two copies are not summed", pp=2, model=TIED)
def _(patch):
    original = buckets.all_reduce
    patch.setattr(
        buckets,
        "all_reduce",
        lambda x, group, axis, *rest: x if axis == "pp" else original(x, group, axis, *rest),
    )


@PIPELINE("tied embeddings: the norm counts both copies", pp=2, model=TIED)
def _(patch):
    original = apply.registry

    def registry(*args):
        return {name: replace(info, owner=True) for name, info in original(*args).items()}

    patch.setattr(apply, "registry", registry)


@PIPELINE("stages start from other weights than the whole model", pp=2)
def _(patch):
    original = apply.init_stage
    patch.setattr(
        apply,
        "init_stage",
        lambda stage, model, seed, table: original(stage, model, seed + (not stage.first), table),
    )


@PIPELINE("the last stage takes the targets of another micro-batch", pp=2)
def _(patch):
    original = Pipeline.run

    def run(self, batches, scale):
        last = any(map(self.schedule.is_last, self.stages))
        return original(self, batches[::-1] if last else batches, scale)

    patch.setattr(Pipeline, "run", run)


@PIPELINE("a stage's gradient goes to the stage before as it was received", pp=2, micro_batches=1)
def _(patch):
    original = Transfers.put

    def put(self, kind, stage, micro_batch, tensor):
        original(self, kind, stage, micro_batch, tensor * 0.5 if kind.name == "SEND_B" else tensor)

    patch.setattr(Transfers, "put", put)


@PIPELINE("zero-bubble: one weight gradient is forgotten", pp=2, schedule="zb_h1")
def _(patch):
    original = DeferredWeightGrads.compute
    patch.setattr(DeferredWeightGrads, "compute", lambda self, notes: original(self, notes[1:]))


@PIPELINE(
    "zero-bubble: weight gradients of a micro-batch are worked off twice", pp=2, schedule="zb_h1"
)
def _(patch):
    original = DeferredWeightGrads.compute

    def twice(self, notes):
        original(self, [*notes, *notes[-1:]])

    patch.setattr(DeferredWeightGrads, "compute", twice)


@PIPELINE("dualpipe: the two copies of the model are not summed", pp=2, schedule="dualpipe")
def _(patch):
    original = mesh._two_copies

    def alone(plan, name, rank):
        if name == "grad":
            return next(tuple(group) for group in plan.groups["grad"] if rank in group)
        return original(plan, name, rank)

    patch.setattr(mesh, "_two_copies", alone)
