"""Column-parallel linears that share an input, as one operation that overlaps its communication.

The regions `Copy` and `Gather` communicate before the linears; here both happen at once, as in Megatron-LM's linears
(`mc/tensor_parallel/layers.py`; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). In backward:

    TP         all-reduce of the input's gradient                  | while the weights' gradients are computed
    TP + SP    all-gather of the input, of which a shard was kept  | while the input's gradient is computed
               reduce-scatter of the input's gradient              | while the weights' gradients are computed

With SP a rank keeps only its [b, s/tp, h] of the input from forward to backward, at the price of one more all-gather.
Recomputed blocks keep the whole input (`keep`): they have just gathered it and live for one backward only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.comm.collectives import CommCounter, start_all_reduce
from trainer.model.linear import Linear

from .tensor import AXIS, start_gather_sequence, start_scatter_sequence

Later = Callable[[], Tensor]


class OverlappedColumnLinears:
    """Replaces `model.linear.apply_linears`: x [b, s or s/tp, hidden] -> [b, s, output slice] of each linear.

    Raises ValueError for a linear whose `op` has been replaced.
    """

    def __init__(self, group: dist.ProcessGroup, counter: CommCounter, sp: bool, keep: bool = False):
        self.group, self.counter, self.sp, self.keep = group, counter, sp, keep

    def __call__(self, x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        for linear in linears:
            if linear.op is not F.linear:
                raise ValueError(f"the op {linear.op!r} of a Linear would not run: its linears are one operation here")
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return _OverlappedColumnLinears.apply(x, self, *weights, *biases)

    def start_gather(self, x: Tensor) -> Later:
        """Start to gather the whole sequence of the input."""
        return start_gather_sequence(x, self.group, self.counter) if self.sp else lambda: x

    def start_sum(self, grad: Tensor) -> Later:
        """Start to sum the input's gradient over ranks; `grad` [b, s, h] is reused."""
        if self.sp:
            return start_scatter_sequence(grad, self.group, self.counter)
        return start_all_reduce(grad, self.group, AXIS, self.counter).wait


class _OverlappedColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: OverlappedColumnLinears, *params: Tensor | None) -> tuple[Tensor, ...]:
        many = len(params) // 2
        weights, biases = cast("tuple[Tensor, ...]", params[:many]), params[many:]
        whole = columns.start_gather(x)()
        ctx.columns, ctx.is_whole = columns, columns.keep or not columns.sp
        ctx.save_for_backward(whole if ctx.is_whole else x, *weights)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        many, columns = len(weights), ctx.columns
        gathered = (lambda: x) if ctx.is_whole else columns.start_gather(x)
        flat = [grad.flatten(0, -2) for grad in grads]
        summed = None
        if ctx.needs_input_grad[0]:
            whole_grad = flat[0] @ weights[0]
            for grad, weight in zip(flat[1:], weights[1:], strict=True):
                whole_grad.addmm_(grad, weight)
            summed = columns.start_sum(whole_grad.view(*grads[0].shape[:-1], -1))
        needs = ctx.needs_input_grad[2:]
        whole = gathered().flatten(0, -2)
        of_weights = [grad.T @ whole if need else None for grad, need in zip(flat, needs[:many], strict=True)]
        of_biases = [grad.sum(0) if need else None for grad, need in zip(flat, needs[many:], strict=True)]
        return (summed() if summed else None), None, *of_weights, *of_biases
