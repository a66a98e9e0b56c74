"""Tensor and sequence parallelism against DTensor's plan for the same blocks
(torch.distributed.tensor.parallel)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from orchestrator.plan import Plan
from trainer.model.linear import Embedding, Linear
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage

from .common import Batches, Ours, adamw, new_stage, plan_of
from .harness import Case, Step


def with_torchs_modules(stage: Stage) -> Stage:
    """The same weights in nn.Linear, nn.Embedding and nn.RMSNorm, which DTensor's styles ask
    for."""
    for path, module in list(stage.named_modules()):
        new: nn.Module
        if isinstance(module, Linear):
            new = nn.Linear(
                module.weight.shape[1], module.weight.shape[0], bias=module.bias is not None
            )
        elif isinstance(module, Embedding):
            new = nn.Embedding(*module.weight.shape)
        elif path.rpartition(".")[2].startswith("norm"):
            new = nn.RMSNorm(module.weight.shape[0], eps=module.eps)
        else:
            continue
        new.to(module.weight.device).load_state_dict(module.state_dict())
        stage.set_submodule(path, new)
    stage.tie()
    return stage


def parallelized(stage: Stage, tp: int, sp: bool) -> Stage:
    mesh = init_device_mesh("cpu", (tp,))
    outside = Shard(1) if sp else Replicate()
    row = RowwiseParallel(output_layouts=outside)
    column = ColwiseParallel()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
        "head": ColwiseParallel(
            input_layouts=outside, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for layer in stage.layers:
        at = f"layers.{layer}."
        plan |= {at + f"attn.{name}": column for name in ("wq", "wk", "wv")}
        plan |= {
            at + "mlp.gate": column,
            at + "mlp.up": column,
            at + "attn.wo": row,
            at + "mlp.down": row,
        }
        if sp:
            whole = {
                "input_layouts": (Shard(1), None, None, None),
                "desired_input_layouts": (Replicate(),) + 3 * (None,),
            }
            plan |= {at + "norm1": SequenceParallel(), at + "norm2": SequenceParallel()}
            plan |= {at + "attn": PrepareModuleInput(**whole)}
            plan |= {
                at + "mlp": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                )
            }
    if sp:
        plan["norm"] = SequenceParallel()
    return parallelize_module(stage, mesh, plan)


class WithDTensor:
    def __init__(self, plan: Plan, batches: Batches):
        self.plan = plan
        self.batches = batches
        self.model = parallelized(
            with_torchs_modules(new_stage(plan)), plan.parallel.tp, plan.parallel.sp
        )
        self.cut = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        self.whole = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        self.optimizers = [
            adamw(plan, params, fused=True) for params in (self.cut, self.whole) if params
        ]

    def __call__(self) -> Tensor:
        total = torch.zeros(())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for batch in self.batches.mine:
            with loss_parallel():
                loss = cross_entropy_sum(self.model(None, batch), batch.targets)
                (loss / self.batches.valid).backward()
            total += loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        return total

    def clip(self) -> None:
        """clip_grad_norm_ refuses a mixture of DTensors and plain tensors: the norm in two parts,
        then the same."""
        norms = [
            nn.utils.get_total_norm([p.grad for p in params])
            for params in (self.cut, self.whole)
            if params
        ]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = torch.stack(norms).square().sum().sqrt()
        coefficient = (self.plan.job.train.clip_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for param in (*self.cut, *self.whole):
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            grad.mul_(coefficient)


def build(rank: int, plan: Plan) -> tuple[Step, Step]:
    batches = Batches(plan, rank)
    return Ours(plan, rank, batches), WithDTensor(plan, batches)


def cases(size: str) -> list[Case]:
    return [
        Case("tp", "DTensor, loss parallel", plan_of(size, tp=2, sp=False), build),
        Case("tp + sp", "DTensor, SequenceParallel", plan_of(size, tp=2, sp=True), build),
    ]
