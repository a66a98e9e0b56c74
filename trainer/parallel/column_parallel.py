"""Column-parallel linears that share an input, as one operation that overlaps its communication.

The regions `Copy` and `Gather` communicate before the linears; here communication and products
overlap, as in Megatron-LM's linears (`mc/tensor_parallel/layers.py`; Korthikanti et al. 2022, arXiv
2205.05198, section 4.2.2). In backward:

    TP         all-reduce of the input's gradient       | overlaps with the weights' gradients
    TP + SP    all-gather of the input from its shards  | overlaps with the input's gradient
               reduce-scatter of the input's gradient   | overlaps with the weights' gradients

With SP a rank keeps only its [b, s/tp, h] of the input from forward to backward, at the price of
one more all-gather. Recomputed blocks keep the whole input (`keep`): they have just gathered it,
and live for one backward only.

In forward the products wait for the whole input, or, in `pieces`, for one piece while the next one
travels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, start_all_reduce
from trainer.model.linear import Linear, LinearOp

from .pieces import Pieces, gather_ahead
from .tensor import AXIS, start_gather_sequence, start_scatter_sequence

#: Waits for a tensor that a collective is producing, and returns it.
TensorFuture = Callable[[], Tensor]


class OverlappedColumnLinears:
    """Replaces `model.linear.apply_linears`: x [b, s or s/tp, hidden] -> [b, s, output slice] of
    each linear, computed by its `op`. `keep`: keeps the gathered input for backward. `pieces`: the
    most in which it is gathered."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        counter: CommCounter,
        sp: bool,
        keep: bool = False,
        pieces: int = 1,
    ):
        self.group = group
        self.counter = counter
        self.sp = sp
        self.keep = keep
        self.limit = pieces

    def __call__(self, x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        return _OverlappedColumnLinears.apply(
            x,
            self,
            [linear.op for linear in linears],
            *weights,
            *biases,
        )

    def run(self, linear: Linear, x: Tensor) -> Tensor:
        """A `Linear.run` for a linear that does not share its input."""
        (out,) = self(x, (linear,))
        return out

    def start_gather(self, x: Tensor) -> TensorFuture:
        """Starts to gather the whole sequence of the input."""
        return start_gather_sequence(x, self.group, self.counter) if self.sp else lambda: x

    def start_whole(self, saved_input: Tensor, pieces: Pieces) -> TensorFuture | None:
        """Starts to make the whole input of what was saved of it; None if the ops saved what they
        need."""
        if self.sp and not self.keep:
            return self.start_gather(saved_input)
        return partial(pieces.in_sequence, saved_input) if pieces.count > 1 else None

    def pieces(self, x: Tensor) -> Pieces:
        """The pieces of an input that is a shard of the sequence."""
        ranks = self.group.size() if self.sp else 1
        return Pieces.of(x.shape[0], x.shape[1], ranks, self.limit if self.sp else 1)

    def start_sum(self, grad: Tensor) -> TensorFuture:
        """Starts to sum the input's gradient over ranks; `grad` [b, s, h] is reused."""
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
        pieces = columns.pieces(x)
        ctx.columns = columns
        ctx.ops = ops
        ctx.pieces = pieces
        if pieces.count > 1:
            full_x, outs = _multiply_pieces(x, columns, pieces, ops, weights)
            for out, bias in zip(outs, biases, strict=True):
                if bias is not None:
                    out.add_(bias)
        else:
            full_x = columns.start_gather(x)()
            outs = [
                op.forward(full_x, weight, bias)
                for op, weight, bias in zip(ops, weights, biases, strict=True)
            ]
        saved: list[tuple[Tensor, ...]]
        if columns.sp and not columns.keep:
            saved = [(x,)]
        elif pieces.count > 1:
            saved = [(full_x,)]
        else:
            saved = [op.saved(full_x) for op in ops]
        ctx.sizes = [len(tensors) for tensors in saved]
        ctx.save_for_backward(*weights, *(tensor for tensors in saved for tensor in tensors))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns = ctx.columns
        ops = ctx.ops
        saved = list(ctx.saved_tensors)
        weights = saved[: len(ops)]
        saved_inputs = saved[len(ops) :]
        whole_input = columns.start_whole(saved_inputs[0], ctx.pieces)
        flat_grads = [grad.flatten(0, -2) for grad in grads]
        input_grad: TensorFuture | None = None
        if ctx.needs_input_grad[0]:
            partial_grad = _input_grad(ops, flat_grads, weights)
            input_grad = columns.start_sum(partial_grad.view(*grads[0].shape[:-1], -1))
        if whole_input is None:
            inputs_by_op = _split(saved_inputs, ctx.sizes)
        else:
            full_x = whole_input()
            inputs_by_op = [op.saved(full_x) for op in ops]
        needs = ctx.needs_input_grad[3:]
        weight_grads = [
            op.weight_grad(grad, saved_input) if need else None
            for op, grad, saved_input, need in zip(
                ops,
                flat_grads,
                inputs_by_op,
                needs[: len(ops)],
                strict=True,
            )
        ]
        bias_grads = [
            grad.sum(0) if need else None
            for grad, need in zip(flat_grads, needs[len(ops) :], strict=True)
        ]
        return (input_grad() if input_grad else None), None, None, *weight_grads, *bias_grads


def _multiply_pieces(
    x: Tensor,
    columns: OverlappedColumnLinears,
    pieces: Pieces,
    ops: Sequence[LinearOp],
    weights: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Gathers the input piece by piece and multiplies each while the next one travels. Returns the
    joined pieces and the products."""
    tokens = pieces.count * pieces.tokens
    joined = x.new_empty(tokens, x.shape[-1])
    outs = [x.new_empty(x.shape[0], tokens // x.shape[0], weight.shape[0]) for weight in weights]
    pieces_of_outs = [pieces.of_sequence(out) for out in outs]
    gathered = gather_ahead(x.contiguous(), joined, pieces, columns.group, columns.counter)
    for piece, products in zip(gathered, zip(*pieces_of_outs, strict=True), strict=True):
        for op, product, weight in zip(ops, products, weights, strict=True):
            op.forward_into(product, piece, weight)
    return joined, outs


def _input_grad(
    ops: Sequence[LinearOp],
    flat_grads: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Tensor:
    """Returns the gradient of the shared input from this rank's output slices."""
    total = ops[0].input_grad(flat_grads[0], weights[0])
    for op, grad, weight in zip(ops[1:], flat_grads[1:], weights[1:], strict=True):
        op.add_input_grad(total, grad, weight)
    return total


def _split(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    """Splits a list into consecutive lists of `sizes`."""
    remaining = iter(tensors)
    return [list(itertools.islice(remaining, size)) for size in sizes]
