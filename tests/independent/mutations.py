"""Seeded bugs of the loop, the optimizer, the precisions and checkpoints: patches on the trainer's
modules, put on before the ranks are forked. None touches what the oracle imports. Each says by
which quantity it must be caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec
import pytest
import torch

import trainer.checkpoint.background as background
import trainer.data.batch as batch
import trainer.data.loader as loader
import trainer.data.order as order
import trainer.engine as engine
import trainer.model.attention as attention
import trainer.model.init as init
import trainer.model.stage as stage
import trainer.optim.adamw as adamw
import trainer.optim.clip as clip
import trainer.optim.loss_scale as loss_scale
import trainer.optim.sharded as sharded
import trainer.parallel.apply as apply
import trainer.train as train
from tests.mutations.base import after
from trainer.data.batch import IGNORED
from trainer.pipeline.runtime import Pipeline


class Mutation(NamedTuple):
    """`make test` runs those that are `first`, `make verify` all."""

    name: str
    by: str  # a quantity beyond its bound, or part of a problem
    precision: str
    layouts: tuple[str, str]
    number: int
    patch: Callable[[pytest.MonkeyPatch], None]
    first: bool


MUTATIONS: list[Mutation] = []
ONE = ("dp1", "dp1")
TWO = ("dp2_zero1", "tp2")


def mutation(
    name: str,
    by: str,
    precision: str = "fp32",
    layouts: tuple[str, str] = ONE,
    number: int = 0,
    first: bool = False,
) -> Callable:
    def add(patch: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
        MUTATIONS.append(Mutation(name, by, precision, layouts, number, patch, first))
        return patch

    return add


# ---------------------------------------------------------------------------------------------------
#     the loop


@mutation("the learning rate is one step late", "lr")
def _(patch):
    late(patch, lambda step: max(1, step - 1))


def late(patch: pytest.MonkeyPatch, at: Callable[[int], int]) -> None:
    rate = train.learning_rate
    patch.setattr(train, "learning_rate", lambda step, *rest: rate(at(step), *rest))


@mutation("the learning rate is one step late and reported as if it were not", "weight", first=True)
def _(patch):
    update = engine.Engine.update
    rates: list[float] = []

    def one_late(self, norm, lr):
        rates.append(lr)
        return update(self, norm, rates[-2] if len(rates) > 1 else lr)

    patch.setattr(engine.Engine, "update", one_late)


@mutation("the last micro-batch is dropped", "gradient")
def _(patch):
    run = Pipeline.run

    def shorter(self, batches, scale):
        last = batches[-1]
        return run(
            self,
            [*batches[:-1], replace(last, targets=torch.full_like(last.targets, IGNORED))],
            scale,
        )

    patch.setattr(Pipeline, "run", shorter)


@mutation("every epoch has the same order", "gradient")
def _(patch):
    patch.setattr(
        order.SampleOrder, "__call__", lambda self, consumed: self._epoch(consumed % self.samples)
    )


@mutation("an epoch ends a sample early", "gradient")
def _(patch):
    make = order.SampleOrder.__init__
    patch.setattr(
        order.SampleOrder, "__init__", lambda self, samples, seed: make(self, samples - 1, seed)
    )


@mutation("a resumed run repeats its last batch", "samples")
def _(patch):
    moved(patch, -1)


@mutation("a resumed run skips a batch", "samples")
def _(patch):
    moved(patch, 1)


def moved(patch: pytest.MonkeyPatch, batches: int) -> None:
    resume = train.Run.resume

    def elsewhere(self):
        resume(self)
        if self.step:
            self.samples += batches * self.loader.samples_at(self.samples)

    patch.setattr(train.Run, "resume", elsewhere)


@mutation(
    "a resumed run reads the batch before, and reports the right samples", "gradient", first=True
)
def _(patch):
    read = loader.Loader._read
    resumed: list[bool] = []
    resume = train.Run.resume

    def note(self):
        resume(self)
        resumed.append(self.step > 0)

    patch.setattr(train.Run, "resume", note)
    patch.setattr(
        loader.Loader, "_read", lambda self, at: read(self, at - any(resumed) * self.samples_at(at))
    )


@mutation("a batch that grows is as large as it will be", "samples", layouts=("dp1", "dp2"))
def _(patch):
    for module in (order, loader, train):
        patch.setattr(
            module, "micro_batches_at", lambda parallel, ramp, consumed: parallel.micro_batches
        )


@mutation(
    "the loss is divided by the tokens of one replica", "gradient", "fp64", layouts=("dp2", "dp1")
)
def _(patch):
    gradients = engine.Engine.gradients

    def local(self, batches, valid_tokens):
        own_tokens = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        return gradients(self, batches, own_tokens * self.mesh.size("dp"))

    patch.setattr(engine.Engine, "gradients", local)


@mutation("the reported loss is that of one replica", "report losses", layouts=("dp2", "dp1"))
def _(patch):
    def local(self, loss_sum):
        return loss_sum.double() * self.mesh.size("dp") if self.has_loss else None

    patch.setattr(engine.Engine, "loss_total", local)


# ---------------------------------------------------------------------------------------------------
#     documents


@mutation("what follows a document counts as its target", "gradient", "fp64")
def _(patch):
    read = batch.from_windows

    def counted(windows, eod=None):
        return replace(read(windows, eod), targets=windows[:, 1:].contiguous())

    patch.setattr(loader, "from_windows", counted)


@mutation("attention sees the documents before", "gradient", "fp64")
def _(patch):
    read = batch.from_windows
    patch.setattr(loader, "from_windows", lambda *args: replace(read(*args), documents=None))


@mutation("positions go on from document to document", "gradient", number=1)
def _(patch):
    read = batch.from_windows

    def on(windows, eod=None):
        batch = read(windows, eod)
        return replace(
            batch,
            positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens).contiguous(),
        )

    patch.setattr(loader, "from_windows", on)


# ---------------------------------------------------------------------------------------------------
#     the model


@mutation("the base of rotary positions is ignored", "gradient")
def _(patch):
    tables = stage.rope_tables

    def usual(positions, model, dtype):
        return tables(positions, msgspec.structs.replace(model, rope_theta=1e4), dtype)

    patch.setattr(stage, "rope_tables", usual)


@mutation("rotary angles are computed in bf16", "rounding", "bf16", first=True)
def _(patch):
    def narrow(positions, model, dtype):
        steps = torch.arange(0, model.head_dim, 2, dtype=dtype) / model.head_dim
        angles = positions.to(dtype)[:, :, None, None] * model.rope_theta**-steps
        return angles.cos(), angles.sin()

    patch.setattr(stage, "rope_tables", narrow)


@mutation("rotary angles are computed in fp16", "rounding", "fp16")
def _(patch):
    def narrow(positions, model, dtype):
        steps = torch.arange(0, model.head_dim, 2, dtype=dtype) / model.head_dim
        angles = positions.to(dtype)[:, :, None, None] * model.rope_theta**-steps
        return angles.cos(), angles.sin()

    patch.setattr(stage, "rope_tables", narrow)


@mutation("the norm's epsilon is another", "gradient", "fp64")
def _(patch):
    make = stage.make_norm
    import trainer.model.block as block

    def other(model):
        return make(msgspec.structs.replace(model, norm_eps=1e-6))

    patch.setattr(stage, "make_norm", other)
    patch.setattr(block, "make_norm", other)


@mutation("initial weights of the residual's writers are not scaled down", "gradient", "fp64")
def _(patch):
    patch.setattr(init, "std", lambda name, model: (2.0 / (5.0 * model.hidden)) ** 0.5)


@mutation(
    "attention's weights are rounded and summed one by one before they are divided",
    "rounding",
    "bf16",
)
def _(patch):
    def rounded(self, q, k, v, serial, documents):
        mask = self._mask(
            torch.zeros(q.shape[:2], dtype=torch.int64) if documents is None else documents.numbers
        )
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        weights = (
            (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).exp()
        )
        return (weights / sum(weights.split(1, dim=-1)) @ v).transpose(1, 2)

    patch.setattr(attention.SDPA, "__call__", rounded)


# ---------------------------------------------------------------------------------------------------
#     the optimizer


@mutation("weight decay on norms", "weight")
def _(patch):
    shard = apply.shard
    patch.setattr(apply, "shard", lambda *args, **rest: replace(shard(*args, **rest), decay=True))


@mutation(
    "gradients are clipped by the norm of this rank", "ranks report", layouts=("dp2_zero1", "dp1")
)
def _(patch):
    patch.setattr(clip, "all_reduce", lambda tensor, *args: tensor)


@mutation(
    "gradients are clipped by the norm of this rank, and the right one is reported",
    "gradient",
    layouts=TWO,
)
def _(patch):
    norm = engine.grad_norm
    local: list[torch.Tensor] = []

    def both(*args):
        with pytest.MonkeyPatch.context() as alone:
            alone.setattr(clip, "all_reduce", lambda tensor, *args: tensor)
            local.append(norm(*args))
        return norm(*args)

    coefficient = engine.clip_coefficient
    patch.setattr(engine, "grad_norm", both)
    patch.setattr(engine, "clip_coefficient", lambda norm, limit: coefficient(local[-1], limit))


@mutation("AdamW's epsilon is under the root", "weight")
def _(patch):
    update = adamw.fused_adamw_

    def under(*args, eps, **kwargs):
        update(*args, eps=eps**0.5, **kwargs)

    patch.setattr(adamw, "fused_adamw_", under)


@mutation("AdamW's betas are exchanged", "second moment")
def _(patch):
    update = adamw.fused_adamw_
    patch.setattr(
        adamw,
        "fused_adamw_",
        lambda *args, betas, **kwargs: update(*args, betas=(betas[0], betas[0]), **kwargs),
    )


# ---------------------------------------------------------------------------------------------------
#     precisions


@mutation("fp16 gradients are never unscaled", "gradient", "fp16", first=True)
def _(patch):
    scaled(patch, lambda factor, scale: factor * scale)


def scaled(patch: pytest.MonkeyPatch, factor_of: Callable) -> None:
    """AdamW gets another factor on gradients: `factor_of` the right one and the loss scale."""
    update = engine.Engine.update
    step = sharded.ShardedOptimizer.step
    scales: list[torch.Tensor] = []

    def note(self, norm, lr):
        scales.append(self.scaler.current)
        return update(self, norm, lr)

    patch.setattr(engine.Engine, "update", note)
    patch.setattr(
        sharded.ShardedOptimizer,
        "step",
        lambda self, lr, factor, finite: step(self, lr, factor_of(factor, scales[-1]), finite),
    )


@mutation("fp16 is clipped by the norm of the scaled gradient", "gradient", "fp16")
def _(patch):
    coefficient = engine.clip_coefficient
    patch.setattr(
        engine, "clip_coefficient", lambda norm, limit: coefficient(norm * 2.0**14, limit or 1.0)
    )


@mutation("skipped fp16 steps count for the bias correction", "updates", "fp16")
def _(patch):
    update = engine.Engine.update

    def counted(self, norm, lr):
        done = update(self, norm, lr)
        self.optimizer.step_count = self.optimizer.step_count + int(not done)
        return done

    patch.setattr(engine.Engine, "update", counted)


@mutation(
    "the bias correction counts steps, skipped or not, and the checkpoint updates", "weight", "fp16"
)
def _(patch):
    update = engine.Engine.update
    fused = adamw.fused_adamw_
    skipped = []

    def note(self, norm, lr):
        done = update(self, norm, lr)
        skipped.append(int(not done))
        return done

    def more(params, grads, first, second, step, **rest):
        return fused(params, grads, first, second, step + sum(skipped), **rest)

    patch.setattr(engine.Engine, "update", note)
    patch.setattr(adamw, "fused_adamw_", more)


@mutation(
    "a run that goes on forgets how long the loss scale has held", "loss scale", "fp16", number=1
)
def _(patch):
    restore = loss_scale.LossScale.restore

    def forget(self, scalars):
        restore(self, scalars)
        self._good_steps.zero_()

    patch.setattr(loss_scale.LossScale, "restore", forget)


@mutation(
    "ZeRO-3 reduces in bf16 against grad_dtype=fp32",
    "narrow",
    "bf16",
    ("dp4_zero3", "dp1"),
    first=True,
)
def _(patch):
    import trainer.parallel.data.fsdp as fsdp

    policy = fsdp.MixedPrecisionPolicy

    def narrow(param_dtype, reduce_dtype, **kwargs):
        return policy(param_dtype=param_dtype, reduce_dtype=param_dtype, **kwargs)

    patch.setattr(fsdp, "MixedPrecisionPolicy", narrow)


@mutation("gradients are summed in bf16 against grad_dtype=fp32", "narrow", "bf16", ("dp4", "dp1"))
def _(patch):
    make = train.recipe
    patch.setattr(train, "recipe", lambda job: replace(make(job), reduce=torch.bfloat16))


@mutation("the master weights are taken from the rounded ones", "weight", "bf16")
def _(patch):
    step = sharded.ShardedOptimizer.step

    def rounded(self, *args):
        for bucket, state in zip(self.buckets.buckets, self.states, strict=True):
            state.master.copy_(bucket.param_shard)
        step(self, *args)

    patch.setattr(sharded.ShardedOptimizer, "step", rounded)


# ---------------------------------------------------------------------------------------------------
#     checkpoints


@mutation("a resumed run has lost its moments", "second moment")
def _(patch):
    def lost(self, step, scalars):
        for state in self.optimizer.states:
            state.state["exp_avg_sq"].zero_()

    after(patch, engine.Engine, "resumed", lost)


@mutation("a resumed run begins to count its updates anew", "updates")
def _(patch):
    def lost(self, step, scalars):
        self.optimizer.step_count = 0

    after(patch, engine.Engine, "resumed", lost)


def live(patch: pytest.MonkeyPatch) -> None:
    """Save the tensors that training goes on to change, instead of copies."""
    patch.setattr(background.Snapshot, "take", lambda self, pieces: list(pieces))
