"""What all techniques share: the model, its batches, and our step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from orchestrator.plan import Plan
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.mesh import Mesh
from trainer.data.batch import IGNORED, MicroBatch
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.model.init import init_stage
from trainer.model.stage import Stage
from trainer.precision import recipe
from trainer.verify.samples import micro_batch

LR = 1e-3
#: Both sides fill buckets of the size that torch's DDP takes by default.
BUCKET_BYTES = 25 << 20
#: 5.1 million parameters: a step of half a second, in which matrix products are most of the work.
SIZES = {
    "base": {
        "layers": 4,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 32,
        "ffn_hidden": 704,
        "vocab": 4096,
    },
    "small": {
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_hidden": 160,
        "vocab": 512,
    },
}


def plan_of(size: str, seq_len: int = 128, **layout: object) -> Plan:
    model = tiny_model(**SIZES[size], max_seq_len=max(seq_len, 64))
    defaults = {"micro_batches": 2, "micro_batch_size": 2, "bucket_bytes": BUCKET_BYTES}
    return make_plan(model=model, seq_len=seq_len, **defaults | layout)


def new_stage(plan: Plan, device: torch.device | str = "cpu") -> Stage:
    """The whole model with its initial weights, no parallelism."""
    with torch.device(device):
        stage = Stage(plan.model, range(plan.model.layers), first=True, last=True)
    init_stage(stage, plan.model, plan.job.train.seed)
    return stage


class Batches:
    """The same tokens every step: this rank's micro-batches and the valid tokens of all of them."""

    def __init__(self, plan: Plan, rank: int):
        size = plan.parallel.global_batch_samples
        indices = samples_of_step(plan.parallel, plan.ranks[rank].coord, 0)
        self.mine: list[MicroBatch] = [micro_batch(plan, one) for one in indices]
        self.valid = int((micro_batch(plan, list(range(size))).targets != IGNORED).sum())


class Ours:
    """One step of our engine, up to and including whole parameters for the next."""

    def __init__(self, plan: Plan, rank: int, batches: Batches):
        self.engine = Engine(
            plan, Mesh.from_plan(plan, rank), torch.device("cpu"), recipe(plan.job.train)
        )
        self.batches = batches

    def __call__(self) -> Tensor:
        loss_sum, norm = self.engine.gradients(self.batches.mine, self.batches.valid)
        self.engine.update(norm, LR)
        self.engine.buckets.wait_params()
        return loss_sum


def adamw(
    plan: Plan, params: Sequence[nn.Parameter], make: object = torch.optim.AdamW, **extra: object
):
    """torch's optimizer with the plan's numbers, in its fastest form."""
    optim = plan.job.optim
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    options = {"lr": LR, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    return make(groups, **options, **extra)
