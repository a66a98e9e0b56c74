"""Bugs of data parallelism, ZeRO and the optimizer."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

import trainer.data.order as order
import trainer.engine as engine
import trainer.optim.clip as clip
import trainer.parallel.apply as apply
import trainer.parallel.data.buckets as buckets
import trainer.parallel.data.flat_bucket as flat_bucket
import trainer.parallel.data.zero2 as zero2
import trainer.parallel.recompute as recompute
import trainer.parallel.reserved_inputs as reserved_inputs
import trainer.verify.samples as samples
from trainer.comm.collectives import Handle
from trainer.data.batch import IGNORED, MicroBatch
from trainer.optim.sharded import ShardedOptimizer
from trainer.parallel.vocab import VocabParallelLoss
from trainer.pipeline.runtime import Pipeline

from .base import Mutations, after

DATA = Mutations()


@DATA(
    "gradient divided by the number of ranks: torch's mean on top of a loss already divided", dp=2
)
def _(patch):
    def divide(self):
        for bucket in self.buckets:
            bucket.grad_shard.div_(self.mesh.size("grad"))

    after(patch, buckets.GradBuckets, "finish", divide)


@DATA("stale bucket: the second step adds to the gradients of the first", dp=2)
def _(patch):
    def keep(self, passes):
        if self._uses is not None:
            self._received = [[1] * len(received) for received in self._received]

    after(patch, buckets.GradBuckets, "expect", keep)


@DATA("the first bucket is never reduced", dp=2, bucket_bytes=1 << 12)
def _(patch):
    original = buckets.GradBuckets._start_reduction

    def launch(self):
        if self.started:
            return original(self)
        self.buckets[0].reduction = Handle(self.buckets[0].grads, None, "dp", self.counter)
        self.started += 1

    patch.setattr(buckets.GradBuckets, "_start_reduction", launch)


@DATA(
    "a bucket is reduced before its last gradient: the late one is refused", caught="failed", dp=2
)
def _(patch):
    def early(self, passes):
        for bucket in self.buckets:
            bucket.missing -= 1

    after(patch, buckets.GradBuckets, "expect", early)


@DATA("replicas read the same samples", dp=2)
def _(patch):
    original = samples.samples_of_step
    patch.setattr(
        samples, "samples_of_step", lambda par, coord, *rest: original(par, first(coord), *rest)
    )

    def first(coord):
        return msgspec.structs.replace(coord, dp=0)


@DATA("ZeRO-1: updated parameters are not gathered", dp=2, zero=1)
def _(patch):
    patch.setattr(buckets.GradBuckets, "gather", lambda self, bucket: None)


@DATA("ZeRO-1: each rank clips by the norm of its own shard", dp=2, zero=1)
def _(patch):
    patch.setattr(clip, "all_reduce", lambda tensor, *args: tensor)


@DATA("ZeRO-1 hybrid: shards are not summed over the groups", dp=4, zero=1, zero_group=2)
def _(patch):
    patch.setattr(buckets.GradBuckets, "_sum_parts", lambda self: None)


@DATA("ZeRO-2: a micro-batch's gradient replaces the one before", dp=2, zero=2)
def _(patch):
    def arrive(self):
        number, handle, _ = self._in_flight.pop(0)
        self._arrivals[number] += 1
        self.buckets[number].grad_shard.copy_(handle.wait())

    patch.setattr(zero2.ShardedGradBuckets, "_arrive", arrive)


@DATA("ZeRO-3: torch's mean over ranks instead of the sum", dp=2, zero=3)
def _(patch):
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor
    patch.setattr(
        FSDPModule, "set_gradient_divide_factor", lambda self, factor: original(self, 2.0)
    )


@DATA("ZeRO-3 sums in bf16 what the plan sums in fp32", dp=2, zero=3, cell_precision="bf16")
def _(patch):
    import trainer.parallel.data.fsdp as fsdp

    original = fsdp.MixedPrecisionPolicy

    def narrow(**options):
        return original(**options | {"reduce_dtype": options["param_dtype"]})

    patch.setattr(fsdp, "MixedPrecisionPolicy", narrow)


@DATA("a schedule drops its last micro-batch, of five", micro_batches=5)
def _(patch):
    original = Pipeline.run

    def run(self, batches, scale):
        return original(self, [*batches[:-1], engine.without_targets(batches[-1])], scale)

    patch.setattr(Pipeline, "run", run)


UNEQUAL = {"dp": 3, "replica_micro_batches": [2, 1, 1]}


@DATA("mean of the means of replicas that take unequal numbers of micro-batches", **UNEQUAL)
def _(patch):
    gradients = engine.Engine.gradients

    def mean(self, batches, tokens):
        own_tokens = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        return gradients(self, batches, max(1, own_tokens) * self.mesh.size("dp"))

    patch.setattr(engine.Engine, "gradients", mean)


@DATA("a replica that takes fewer reads the samples of the one that takes more", **UNEQUAL)
def _(patch):
    original = order.firsts

    def shifted(counts, replica):
        return [
            index + (replica > 0 and turn > 0) for turn, index in enumerate(original(counts, 0))
        ][: counts[replica]]

    patch.setattr(order, "firsts", shifted)


@DATA(
    "ZeRO-2: a replica ends its step before the others have reduced theirs",
    caught="failed",
    zero=2,
    **UNEQUAL,
)
def _(patch):
    patch.setattr(engine.Engine, "_pad_micro_batches", lambda self, batches: batches)


@DATA("ZeRO-2: what fills up a replica that takes fewer counts again", zero=2, **UNEQUAL)
def _(patch):
    patch.setattr(engine, "without_targets", lambda batch: batch)


# ------------------------------------------------------------------------------------------- tokens


@DATA("the last micro-batch is dropped", micro_batches=2)
def _(patch):
    original = Pipeline.run

    def run(self, batches, scale):
        last = batches[-1]
        nothing = torch.full_like(last.targets, IGNORED)
        return original(
            self,
            [*batches[:-1], MicroBatch(last.tokens, nothing, last.positions, last.documents)],
            scale,
        )

    patch.setattr(Pipeline, "run", run)


@DATA("mean of means over micro-batches of unequal numbers of tokens", micro_batches=3)
def _(patch):
    loss = VocabParallelLoss.__call__
    gradients = engine.Engine.gradients

    def mean(self, logits, targets):
        return loss(self, logits, targets) / max(1, int((targets != IGNORED).sum()))

    patch.setattr(VocabParallelLoss, "__call__", mean)
    patch.setattr(
        engine.Engine,
        "gradients",
        lambda self, batches, tokens: gradients(self, batches, len(batches)),
    )


@DATA("masked tokens count in the divisor")
def _(patch):
    gradients = engine.Engine.gradients

    def all_tokens(self, batches, tokens):
        return gradients(self, batches, sum(batch.targets.numel() for batch in batches))

    patch.setattr(engine.Engine, "gradients", all_tokens)


# -------------------------------------------------------------------------------------------
#     optimizer, recomputation


@DATA("AdamW's bias correction stands still")
def _(patch):
    original = ShardedOptimizer._update

    def update(self, *args):
        count = self.step_count
        self.step_count = 1  # a rank's state has the count that the update reads
        original(self, *args)
        self.step_count = count

    patch.setattr(ShardedOptimizer, "_update", update)


@DATA("weight decay on norms")
def _(patch):
    original = apply.shard
    patch.setattr(
        apply, "shard", lambda *args, **options: replace(original(*args, **options), decay=True)
    )


@DATA("gradients are not clipped", clip_grad_norm=0.05)
def _(patch):
    patch.setattr(engine, "clip_coefficient", lambda norm, limit: torch.ones_like(norm))


@DATA("of a cut parameter only the first bucket is sent", dp=2, zero=2, comm_buffer_bytes=4096)
def _(patch):
    patch.setattr(flat_bucket.FlatBucket, "buckets", 1)


@DATA(
    "the slot of a kept input is free before its backward",
    recompute="full",
    contiguous_activations=True,
)
def _(patch):
    original = reserved_inputs.ReservedInputs.put

    def put(self, tensor):
        slot = self._free[-1]
        entry = original(self, tensor)
        self._free.append(slot)
        return entry

    patch.setattr(reserved_inputs.ReservedInputs, "put", put)


@DATA("recomputation cuts the graph: no gradient flows to the layers before", recompute="full")
def _(patch):
    original = recompute._checkpointed

    def again(function, contexts=None):
        checkpointed = original(function, contexts)
        return lambda x, *rest: checkpointed(x.detach().requires_grad_(), *rest)

    patch.setattr(recompute, "_checkpointed", again)
