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

Later = Callable[[], Tensor]


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
    def forward(
        ctx: Any,
        x: Tensor,
        columns: OverlappedColumnLinears,
        ops: list[LinearOp],
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        many = len(params) // 2
        weights = cast("tuple[Tensor, ...]", params[:many])
        biases = params[many:]
        whole = columns.start_gather(x)()
        ctx.columns = columns
        ctx.ops = ops
        ctx.is_whole = columns.keep or not columns.sp
        kept = [op.saved(whole) for op in ops] if ctx.is_whole else [(x,)]
        ctx.sizes = [len(one) for one in kept]
        ctx.save_for_backward(*weights, *(tensor for one in kept for tensor in one))
        return tuple(
            op.forward(whole, weight, bias)
            for op, weight, bias in zip(ops, weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns = ctx.columns
        ops = ctx.ops
        saved = list(ctx.saved_tensors)
        many = len(ops)
        weights = saved[:many]
        kept = saved[many:]
        gathered = None if ctx.is_whole else columns.start_gather(kept[0])
        flat = [grad.flatten(0, -2) for grad in grads]
        summed = None
        if ctx.needs_input_grad[0]:
            whole_grad = ops[0].input_grad(flat[0], weights[0])
            for op, grad, weight in zip(ops[1:], flat[1:], weights[1:], strict=True):
                op.add_input_grad(whole_grad, grad, weight)
            summed = columns.start_sum(whole_grad.view(*grads[0].shape[:-1], -1))
        needs = ctx.needs_input_grad[3:]
        if gathered is None:
            inputs = iter(kept)
            of_inputs: list[Sequence[Tensor]] = [
                list(itertools.islice(inputs, size)) for size in ctx.sizes
            ]
        else:
            whole = gathered()
            of_inputs = [op.saved(whole) for op in ops]
        of_weights = [
            op.weight_grad(grad, one) if need else None
            for op, grad, one, need in zip(ops, flat, of_inputs, needs[:many], strict=True)
        ]
        of_biases = [
            grad.sum(0) if need else None for grad, need in zip(flat, needs[many:], strict=True)
        ]
        return (summed() if summed else None), None, None, *of_weights, *of_biases
