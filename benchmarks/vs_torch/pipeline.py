"""Pipeline schedules against torch.distributed.pipelining: forward and backward of all
micro-batches, no optimizer.

torch's schedules leave norm and optimizer to the user, so both sides stop at the gradients.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from orchestrator.plan import Plan
from orchestrator.plan.schedules import schedule_of
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage
from trainer.parallel.apply import build as build_part
from trainer.pipeline.runtime import Pipeline, stage_indices

from .common import Batches, plan_of
from .harness import Case, Step

PAIRS = {
    "afab": (1, "ScheduleGPipe"),
    "1f1b": (1, "Schedule1F1B"),
    "interleaved": (2, "ScheduleInterleaved1F1B"),
    "zbv": (2, "ScheduleZBVZeroBubble"),
    "dualpipev": (2, "ScheduleDualPipeV"),
}


class OneTensorIn(nn.Module):
    """A stage as torch's pipelines call it: tokens or hidden states in, hidden states or logits
    out."""

    def __init__(self, stage: Stage, batches: Batches):
        super().__init__()
        self.stage = stage
        self.positions = batches.mine[0].positions

    def forward(self, x: Tensor) -> Tensor:
        batch = SimpleNamespace(tokens=x, positions=self.positions, documents=None, serial=None)
        return self.stage(None if self.stage.first else x, batch)


def build(rank: int, plan: Plan) -> tuple[Step, Step]:
    par = plan.parallel
    mesh = Mesh.from_plan(plan, rank)
    batches = Batches(plan, rank)
    indices = stage_indices(plan, rank)
    part = build_part(plan, mesh, CommCounter(), indices=indices)
    same_part = build_part(plan, mesh, CommCounter(), indices=indices)
    schedule = schedule_of(par)
    theirs = {
        stage: OneTensorIn(same_stage, batches)
        for same_stage, stage in zip(same_part.stages, schedule.stages_of(rank), strict=True)
    }
    runtime = Pipeline.from_plan(
        plan, part.stages, part.loss, mesh, CommCounter(), dtype=torch.float32
    )
    scale = 1.0 / batches.valid
    count = par.pp * par.vpp
    stages = [
        pipelining.PipelineStage(module, index, count, torch.device("cpu"), group=mesh.group("pp"))
        for index, module in theirs.items()
    ]
    make = getattr(pipelining, PAIRS[par.schedule][1])
    native = make(
        stages[0] if par.vpp == 1 else stages,
        par.micro_batches,
        loss_fn=lambda logits, target: cross_entropy_sum(logits, target) * scale,
        scale_grads=False,
    )
    tokens, targets = (
        torch.cat([getattr(one, name) for one in batches.mine]) for name in ("tokens", "targets")
    )
    first = [tokens] if any(schedule.is_first(stage) for stage in theirs) else []
    last = any(schedule.is_last(stage) for stage in theirs)

    def step_ours() -> Tensor:
        for stage in part.stages:
            stage.zero_grad()
        return runtime.run(batches.mine, scale)

    def step_torchs() -> Tensor:
        for module in theirs.values():
            module.zero_grad()
        losses: list[Tensor] = []
        native.step(*first, **({"target": targets, "losses": losses} if last else {}))
        return sum(losses, torch.zeros(())).detach() / scale

    return step_ours, step_torchs


def cases(size: str) -> list[Case]:
    made = []
    for name, (vpp, native) in PAIRS.items():
        plan = plan_of(size, pp=2, vpp=vpp, schedule=name, micro_batches=8, micro_batch_size=1)
        made.append(Case(f"pp {name}", native, plan, build))
    return made
