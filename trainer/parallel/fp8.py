"""Products in 8 bits on every layout: the linears that use them, and the ranks over which the
largest value of a tensor is taken.

The linears of blocks use 8 bits. Embedding, head, norms, attention's own products and all sums stay
wide, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.1).

    tp   cuts a weight, the gradient of a column-parallel linear, and the input of a row-parallel
        one
    cp   cuts the sequence of inputs and gradients
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from orchestrator.plan import Plan
from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.model.fp8 import BlockOp, Shared, TensorOp
from trainer.model.linear import Linear
from trainer.model.stage import Stage

from .tensor import ROW


class _Over:
    """Takes the largest value over the ranks of mesh axes."""

    def __init__(self, mesh: Mesh, counter: CommCounter, *axes: str):
        self.groups = [(axis, mesh.group(axis)) for axis in axes]
        self.counter = counter

    def __call__(self, largest: Tensor) -> Tensor:
        for axis, group in self.groups:
            largest = all_reduce(largest, group, axis, self.counter, dist.ReduceOp.MAX)
        return largest


def apply_fp8(stage: Stage, plan: Plan, mesh: Mesh, counter: CommCounter) -> None:
    """Makes the linears of a stage's blocks use the plan's `matmul`."""
    tp = _Over(mesh, counter, "tp")
    cp = _Over(mesh, counter, "cp")
    both = _Over(mesh, counter, "tp", "cp")
    shared = Shared()
    for block in stage.blocks.values():
        for name, module in block.named_modules():
            if not isinstance(module, Linear):
                continue
            if plan.job.matmul == "fp8_block":
                module.op = BlockOp(shared)
            elif f"{name}.weight" in ROW:
                module.op = TensorOp(
                    shared,
                    largest_input=both,
                    largest_weight=tp,
                    largest_grad=cp,
                )
            else:
                module.op = TensorOp(
                    shared,
                    largest_input=cp,
                    largest_weight=tp,
                    largest_grad=both,
                )
