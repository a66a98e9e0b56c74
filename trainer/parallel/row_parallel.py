"""Row-parallel linears with the sum of their results over ranks, as one operation in pieces.

The regions `Reduce` and `Scatter` begin when the whole product has been computed. Here a piece
(`pieces`) travels while the next one is multiplied:

               forward                                  backward
    TP         product | all-reduce of a piece          products
    TP + SP    product | reduce-scatter of a piece      all-gather of a piece | product

The node that autograd sees keeps the input and allocates the result; products and sums follow
outside of it. A recomputed block stops when its last input is known again, so it stops here before
the product, and sends nothing twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, Handle, start_all_reduce, start_reduce_scatter
from trainer.model.linear import Linear, LinearOp

from .pieces import Pieces, gather_ahead
from .tensor import AXIS


class OverlappedRowLinear:
    """A `Linear.run`: x [b, s, input slice] -> [b, s or s/tp, hidden], summed over ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        counter: CommCounter,
        sp: bool,
        pieces: int,
    ):
        self.group = group
        self.counter = counter
        self.sp = sp
        self.limit = pieces

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = _RowLinear.apply(x, linear.weight, linear.op, self)
        with torch.no_grad():
            self._fill(out.detach(), x, linear)
        return out

    def pieces(self, x: Tensor) -> Pieces:
        """The pieces of an input; without sequence parallelism every rank has the whole result."""
        ranks = self.group.size() if self.sp else 1
        return Pieces.of(x.shape[0], x.shape[1] // ranks, ranks, self.limit)

    def _fill(self, out: Tensor, x: Tensor, linear: Linear) -> None:
        """Computes the products of all pieces, and writes their sums over ranks."""
        pieces = self.pieces(x)
        sums = list[Handle]()
        for rows, total in zip(pieces.of_sequence(x), pieces.of_shard(out), strict=True):
            partial = total.new_empty(pieces.tokens, total.shape[-1]) if self.sp else total
            linear.op.forward_into(partial.view(*rows.shape[:-1], -1), rows, linear.weight)
            sums.append(self._start_sum(partial, total))
        for handle in sums:
            handle.wait()

    def _start_sum(self, partial: Tensor, total: Tensor) -> Handle:
        if self.sp:
            return start_reduce_scatter(partial, self.group, AXIS, self.counter, total)
        return start_all_reduce(total, self.group, AXIS, self.counter)


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        op: LinearOp,
        row: OverlappedRowLinear,
    ) -> Tensor:
        ctx.op = op
        ctx.row = row
        ctx.save_for_backward(x, weight)
        length = x.shape[1] // row.group.size() if row.sp else x.shape[1]
        return x.new_empty(x.shape[0], length, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        row = ctx.row
        op = ctx.op
        needs_weight = ctx.needs_input_grad[1]
        if not row.sp:
            weight_grad = op.weight_grad(grad, op.saved(x)) if needs_weight else None
            return op.input_grad(grad, weight), weight_grad, None, None
        pieces = row.pieces(x)
        joined = grad.new_empty(pieces.count * pieces.tokens, grad.shape[-1])
        gathered = gather_ahead(grad.contiguous(), joined, pieces, row.group, row.counter)
        input_grad = torch.empty_like(x)
        for rows, piece in zip(pieces.of_sequence(input_grad), gathered, strict=True):
            op.input_grad_into(rows, piece, weight)
        weight_grad = op.weight_grad(joined, op.saved(pieces.join(x))) if needs_weight else None
        return input_grad, weight_grad, None, None
