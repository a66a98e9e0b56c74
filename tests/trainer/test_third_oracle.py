"""The third oracle: torch's own parallelism, where it is right, on the same model, tokens and
ranks.

torch averages gradients over ranks, so its local losses are multiplied by their number. Two steps
in float64; loss, every gradient, norm and weights as in the other proofs.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.schedules import schedule_of
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from tests.trainer.together import run_together
from trainer.data.batch import MicroBatch
from trainer.model.init import init_stage
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage
from trainer.pipeline.runtime import stage_indices
from trainer.precision import FP64
from trainer.verify.samples import step_batches

pytestmark = [pytest.mark.process, pytest.mark.slow]
STEPS = 2
LIMIT = 1e-10
TIED = tiny_model(tied_embeddings=True)


def new_stage(plan: Plan, index: int, count: int) -> Stage:
    begin = sum(plan.parallel.stage_layers[:index])
    layers = range(begin, begin + plan.parallel.stage_layers[index])
    stage = Stage(plan.model, layers, first=index == 0, last=index == count - 1).double()
    init_stage(stage, plan.model, plan.job.train.seed)
    return stage


def adamw(plan: Plan, params: list[nn.Parameter]) -> torch.optim.AdamW:
    optim = plan.job.optim
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=0.0, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False
    )


def set_lr(plan: Plan, optimizer: torch.optim.Optimizer, step: int) -> float:
    lr = learning_rate(step + 1, plan.job.optim, plan.job.train.steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


class Compared:
    """The worst relative difference of each quantity."""

    def __init__(self):
        self.worst: dict[str, float] = {}

    def __call__(self, quantity: str, ours: Tensor, theirs: Tensor) -> None:
        size = max(float(theirs.abs().max()), torch.finfo(theirs.dtype).tiny)  # both may be zero
        error = float((ours - theirs).abs().max()) / size
        self.worst[quantity] = max(
            self.worst.get(quantity, 0.0), error if error == error else math.inf
        )


def data_parallel(rank: int, plan: Plan, kind: str) -> dict[str, float]:
    engine = engine_of(plan, rank, FP64)
    model: nn.Module = new_stage(plan, 0, 1)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.layers.values():
            fully_shard(block)
        theirs = fully_shard(model)
    else:
        theirs = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(plan, list(model.parameters()))
    compared = Compared()
    for step in range(STEPS):
        batches, valid = step_batches(
            plan, plan.ranks[rank].coord, step * plan.parallel.global_batch_samples
        )
        loss_sum, norm = engine.gradients(batches, valid)
        optimizer.zero_grad()
        losses = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            batch_loss = cross_entropy_sum(theirs(None, batch), batch.targets)
            (batch_loss * plan.parallel.dp / valid).backward()
            losses += batch_loss.detach()
        compared("loss", loss_sum, losses)
        grads = {name: full(param.grad) for name, param in model.named_parameters()}
        for name, grad in engine.buckets.full_grads().items():
            compared(f"grad {name}", grad, grads[name])
        theirs_norm = nn.utils.clip_grad_norm_(model.parameters(), plan.job.train.clip_grad_norm)
        compared("norm", norm, full(theirs_norm))
        engine.update(norm, set_lr(plan, optimizer, step))
        optimizer.step()
        engine.buckets.wait_params()
        weights = {name: full(param) for name, param in model.named_parameters()}
        for info, param in engine.buckets.full_params():
            compared(f"weight {info.name}", param, weights[info.name])
    return compared.worst


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(tiny_model(), id="untied", marks=pytest.mark.full),
        pytest.param(TIED, id="tied"),
    ],
)
def test_data_parallelism_and_zero_equal_torchs(kind, model):
    options = {"dp": 2, "micro_batches": 2, "model": model, "bucket_bytes": 1 << 12}
    cases = {f"zero{zero}": (make_plan(zero=zero, **options), kind) for zero in range(4)}
    least = 2 * len(new_stage(make_plan(**options), 0, 1).state_dict()) - 2
    for name, answers in run_together(data_parallel, 2, cases).items():
        for worst in answers:
            assert len(worst) > least and max(worst.values()) < LIMIT, (name, worst)


# -------------------------------------------------------------------------------------------
#     pipelines


class Plain(nn.Module):
    """A stage as torch's pipelines call it: tokens or hidden states in, hidden states or logits
    out."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        batch = MicroBatch(x if self.stage.first else positions, positions, positions, None)
        return self.stage(None if self.stage.first else x, batch)


def pipelined(rank: int, plan: Plan, schedule: str) -> dict[str, float]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as torchs

    class GlooStage(PipelineStage):
        """Torch 2.11 first sends a number to each neighbour, so that NCCL connects them. gloo
        sends nothing to the rank itself, where ZBVZeroBubble has a neighbour, and connects alone."""

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return []

    engine = engine_of(plan, rank, FP64)
    par = plan.parallel
    count = plan.parallel.pp * plan.parallel.vpp
    stages = {index: new_stage(plan, index, count) for index in stage_indices(plan, rank)}
    held = [
        GlooStage(Plain(stage), index, count, torch.device("cpu"))
        for index, stage in stages.items()
    ]
    make = getattr(torchs, schedule)
    compared = Compared()
    several = issubclass(make, torchs.PipelineScheduleMulti)
    for step in range(
        STEPS
    ):  # weights are compared elsewhere: an optimizer knows nothing of pipelines
        batches, valid = step_batches(
            plan, plan.ranks[rank].coord, step * plan.parallel.global_batch_samples
        )
        loss_sum, _ = engine.gradients(batches, valid)
        for stage in stages.values():
            stage.zero_grad()
        runner = make(
            held if several else held[0],
            n_microbatches=par.micro_batches,
            loss_fn=lambda logits, targets, valid=valid: cross_entropy_sum(logits, targets) / valid,
            scale_grads=False,
        )
        tokens, targets = (
            torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "targets")
        )
        losses: list[Tensor] = []
        loss_arguments = {"target": targets, "losses": losses} if count - 1 in stages else {}
        runner.step(*([tokens] if 0 in stages else []), **loss_arguments)
        if losses:
            compared("loss", loss_sum / valid, sum(losses))
        theirs = {name: p.grad for stage in stages.values() for name, p in stage.named_parameters()}
        for name, grad in engine.buckets.full_grads().items():
            compared(f"grad {name}", grad, theirs[name])
    return compared.worst


@pytest.mark.parametrize(
    ("pp", "schedules"),
    [
        (
            2,
            {
                "afab": "GPipe",
                "1f1b": "1F1B",
                "interleaved": "Interleaved1F1B",
                "zbv": "ZBVZeroBubble",
            },
        ),
        (4, {"1f1b": "1F1B"}),
    ],
)
def test_pipelines_equal_torchs(pp, schedules):
    cases = {}
    for ours, torchs in schedules.items():
        vpp = 2 if ours in ("interleaved", "zbv") else 1
        cases[ours] = make_plan(pp=pp, vpp=vpp, schedule=ours, micro_batches=4), f"Schedule{torchs}"
        assert schedule_of(cases[ours][0].parallel).name == ours
    for ours, answers in run_together(pipelined, pp, cases).items():
        quantities = set().union(*answers)
        assert (
            "loss" in quantities
            and len(quantities) == len(dict(new_stage(make_plan(), 0, 1).named_parameters())) + 1
        )
        worst = {quantity: error for answer in answers for quantity, error in answer.items()}
        assert max(worst.values()) < LIMIT, (ours, worst)


def test_torch_is_asked_for_something_that_can_differ():
    """A tenth of a percent on one weight's gradient is seen: the comparison itself is not
    vacuous."""
    compared = Compared()
    compared("grad", torch.ones(3, dtype=torch.float64) * 1.001, torch.ones(3, dtype=torch.float64))
    assert compared.worst["grad"] > LIMIT and not dist.is_initialized()
    compared("nan", torch.full((3,), torch.nan), torch.ones(3))
    compared("zero", torch.zeros(3), torch.zeros(3))
    assert compared.worst["nan"] == math.inf and compared.worst["zero"] == 0.0
