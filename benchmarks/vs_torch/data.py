"""Data parallelism and ZeRO against DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from orchestrator.plan import Plan
from trainer.model.loss import cross_entropy_sum

from .common import Batches, Ours, adamw, new_stage, plan_of
from .harness import Case, Step


class Replicated:
    """DDP as its documentation tunes it: gradients as views of the buckets, a static graph, no_sync
    but for the last micro-batch; `zero` shards the optimizer with ZeroRedundancyOptimizer."""

    def __init__(self, plan: Plan, batches: Batches, zero: bool):
        self.plan = plan
        self.batches = batches
        # a static graph allows no no_sync
        static = len(batches.mine) == 1
        self.model = DistributedDataParallel(
            new_stage(plan), gradient_as_bucket_view=True, static_graph=static
        )
        params = list(self.model.parameters())
        if zero:
            wrapper = {"optimizer_class": torch.optim.AdamW, "parameters_as_bucket_view": True}
            self.optimizer = adamw(plan, params, ZeroRedundancyOptimizer, **wrapper)
        else:
            self.optimizer = adamw(plan, params, fused=True)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        scale = self.plan.parallel.dp / self.batches.valid  # DDP averages over ranks
        total = torch.zeros(())
        last = self.batches.mine[-1]
        for batch in self.batches.mine:
            with nullcontext() if batch is last else self.model.no_sync():
                loss = cross_entropy_sum(self.model(None, batch), batch.targets)
                (loss * scale).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.job.train.clip_grad_norm)
        self.optimizer.step()
        return total


class FullyShard:
    """FSDP2, a unit a block. `reshard`: weights let go after forward (ZeRO-3), or kept until the
    step ends (ZeRO-2)."""

    def __init__(self, plan: Plan, batches: Batches, reshard: bool):
        self.plan = plan
        self.batches = batches
        self.reshard = reshard
        self.model = new_stage(plan)
        for block in self.model.layers.values():
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(self.model, reshard_after_forward=False)
        self.optimizer = adamw(plan, list(self.model.parameters()), fused=True)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        scale = self.plan.parallel.dp / self.batches.valid
        total = torch.zeros(())
        last = self.batches.mine[-1]
        for batch in self.batches.mine:
            if (
                not self.reshard
            ):  # one gathering a step, as our ZeRO-2: whole weights stay between micro-batches
                self.model.set_reshard_after_backward(batch is last)
            loss = cross_entropy_sum(self.model(None, batch), batch.targets)
            (loss * scale).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.job.train.clip_grad_norm)
        self.optimizer.step()
        return total


def _build(native: type, option: bool):
    def build(rank: int, plan: Plan) -> tuple[Step, Step]:
        batches = Batches(plan, rank)
        return Ours(plan, rank, batches), native(plan, batches, option)

    return build


def cases(size: str) -> list[Case]:
    return [
        Case("zero0", "DDP", plan_of(size, dp=2, zero=0), _build(Replicated, False)),
        Case("zero1", "DDP", plan_of(size, dp=2, zero=1), _build(Replicated, False)),
        Case(
            "zero1",
            "DDP + ZeroRedundancyOptimizer",
            plan_of(size, dp=2, zero=1),
            _build(Replicated, True),
        ),
        Case(
            "zero2", "FSDP2, weights kept", plan_of(size, dp=2, zero=2), _build(FullyShard, False)
        ),
        Case("zero3", "FSDP2", plan_of(size, dp=2, zero=3), _build(FullyShard, True)),
    ]
