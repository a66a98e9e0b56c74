"""Column-parallel linears that share an input, as one operation that overlaps its communication.

The regions `Copy` and `Gather` communicate before the linears; here both happen at once, as in
Megatron-LM's linears (`mc/tensor_parallel/layers.py`; Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2). In backward:

    TP         all-reduce of the input's gradient                  | while the weights' gradients
        are computed
    TP + SP    all-gather of the input, of which a shard was kept  | while the input's gradient is
    computed
               reduce-scatter of the input's gradient              | while the weights' gradients
               are computed

With SP a rank keeps only its [b, s/tp, h] of the input from forward to backward, at the price of
one more all-gather. Recomputed blocks keep the whole input (`keep`): they have just gathered it and
live for one backward only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, start_all_reduce
from trainer.model.linear import Linear, LinearOp

from .tensor import AXIS, start_gather_sequence, start_scatter_sequence

TensorFuture = Callable[[], Tensor]


class OverlappedColumnLinears:
    """Replaces `model.linear.apply_linears`: x [b, s or s/tp, hidden] -> [b, s, output slice] of
    each linear, computed by its `op`."""

    def __init__(
        self, group: dist.ProcessGroup, counter: CommCounter, sp: bool, keep: bool = False
    ):
        self.group = group
        self.counter = counter
        self.sp = sp
        self.keep = keep

    def __call__(self, x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        return _OverlappedColumnLinears.apply(
            x, self, [linear.op for linear in linears], *weights, *biases
        )

    def run(self, linear: Linear, x: Tensor) -> Tensor:
        """A `Linear.run`, for one that shares its input with no other."""
        (out,) = self(x, (linear,))
        return out

    def start_gather(self, x: Tensor) -> TensorFuture:
        """Start to gather the whole sequence of the input."""
        return start_gather_sequence(x, self.group, self.counter) if self.sp else lambda: x

    def start_sum(self, grad: Tensor) -> TensorFuture:
        """Start to sum the input's gradient over ranks; `grad` [b, s, h] is reused."""
        if self.sp:
            return start_scatter_sequence(grad, self.group, self.counter)
        return start_all_reduce(grad, self.group, AXIS, self.counter).wait


class _OverlappedColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        columns: OverlappedColumnLinears,
        ops: list[LinearOp],
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(params) // 2
        weights = cast("tuple[Tensor, ...]", params[:count])
        biases = params[count:]
        full_x = columns.start_gather(x)()
        ctx.columns = columns
        ctx.ops = ops
        ctx.is_whole = columns.keep or not columns.sp
        saved = [op.saved(full_x) for op in ops] if ctx.is_whole else [(x,)]
        ctx.sizes = [len(tensors) for tensors in saved]
        ctx.save_for_backward(*weights, *(tensor for tensors in saved for tensor in tensors))
        return tuple(
            op.forward(full_x, weight, bias)
            for op, weight, bias in zip(ops, weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns = ctx.columns
        ops = ctx.ops
        saved = list(ctx.saved_tensors)
        count = len(ops)
        weights = saved[:count]
        saved_inputs = saved[count:]
        gathered = None if ctx.is_whole else columns.start_gather(saved_inputs[0])
        flat_grads = [grad.flatten(0, -2) for grad in grads]
        summed = None
        if ctx.needs_input_grad[0]:
            input_grad = ops[0].input_grad(flat_grads[0], weights[0])
            for op, grad, weight in zip(ops[1:], flat_grads[1:], weights[1:], strict=True):
                op.add_input_grad(input_grad, grad, weight)
            summed = columns.start_sum(input_grad.view(*grads[0].shape[:-1], -1))
        needs = ctx.needs_input_grad[3:]
        if gathered is None:
            inputs = iter(saved_inputs)
            inputs_by_op: list[Sequence[Tensor]] = [
                list(itertools.islice(inputs, size)) for size in ctx.sizes
            ]
        else:
            full_x = gathered()
            inputs_by_op = [op.saved(full_x) for op in ops]
        weight_grads = [
            op.weight_grad(grad, saved_input) if need else None
            for op, grad, saved_input, need in zip(
                ops, flat_grads, inputs_by_op, needs[:count], strict=True
            )
        ]
        bias_grads = [
            grad.sum(0) if need else None
            for grad, need in zip(flat_grads, needs[count:], strict=True)
        ]
        return (summed() if summed else None), None, None, *weight_grads, *bias_grads
