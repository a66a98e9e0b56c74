"""The two modules that hold matrices, and the arithmetic of linears.

`Linear.op` computes the product and its two gradients. Low precision, adapters and offloaded
weights replace only `op`: plain linears, column-parallel ones and split backward all compute with
it. `Linear.run` decides how autograd sees the product; split backward replaces it. The model does
not know the replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearOp:
    """The product of x [..., in] and a weight [out, in], and its gradients: here x @ weight.T
    (+ bias).

    Autograd does not see inside. A rank calls the op with its own slices: column-parallel weights
    hold some of the outputs, row-parallel ones some of the inputs. Row-parallel linears have no
    bias. Results are new tensors. `forward` adds the bias; callers compute its gradient, the sum of
    `grad`.
    """

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """-> [..., out]"""
        return F.linear(x, weight, bias)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors of the input that the weight's gradient needs; low precision keeps
        less than `x`."""
        return (x,)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        """[..., out] -> [..., in]"""
        return grad @ weight

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        """[..., out] and the result of `saved` -> [out, in], summed over the leading dimensions."""
        return grad.flatten(0, -2).T @ saved[0].flatten(0, -2)

    # Products that are written into a part of a larger tensor, [ranks, samples, rows, width] with
    # strides. An op whose kernels make new tensors inherits these.

    def forward_into(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        """Writes `forward` without a bias into `out`."""
        out.copy_(self.forward(x, weight, None))

    def input_grad_into(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Writes `input_grad` into `out`."""
        out.copy_(self.input_grad(grad, weight))

    # The gradients, added to a total. An op without a kernel for the sum inherits these.

    def add_input_grad(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        total.add_(self.input_grad(grad, weight))

    def add_weight_grad(self, total: Tensor, grad: Tensor, saved: Sequence[Tensor]) -> None:
        total.add_(self.weight_grad(grad, saved))


class PlainOp(LinearOp):
    """The op of an unmodified model: sums are part of the matrix product."""

    def forward_into(self, out: Tensor, x: Tensor, weight: Tensor) -> None:
        _multiply_into(out, x, weight.T)

    def input_grad_into(self, out: Tensor, grad: Tensor, weight: Tensor) -> None:
        _multiply_into(out, grad, weight)

    def add_input_grad(self, total: Tensor, grad: Tensor, weight: Tensor) -> None:
        total.view(-1, total.shape[-1]).addmm_(grad.flatten(0, -2), weight)

    def add_weight_grad(self, total: Tensor, grad: Tensor, saved: Sequence[Tensor]) -> None:
        total.addmm_(grad.flatten(0, -2).T, saved[0].flatten(0, -2))


def _multiply_into(out: Tensor, x: Tensor, matrix: Tensor) -> None:
    """Writes x @ matrix, [ranks, samples, rows, in] @ [in, out], without a copy of either: `x` and
    `out` may be strided views, whose rows are contiguous."""
    if x.is_contiguous() and out.is_contiguous():
        torch.mm(x.flatten(0, -2), matrix, out=out.flatten(0, -2))
        return
    # No stride steps through ranks and samples at once: the fewer of them take turns.
    turns = 0 if x.shape[0] < x.shape[1] else 1
    matrices = matrix.expand(x.shape[1 - turns], -1, -1)
    for rows, product in zip(x.unbind(turns), out.unbind(turns), strict=True):
        torch.bmm(rows, matrices, out=product)


PLAIN = PlainOp()


class Linear(nn.Module):
    """[..., in] -> [..., out]: x @ weight.T (+ bias), weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.op: LinearOp = PLAIN
        self.run: Callable[[Linear, Tensor], Tensor] = run
        self.reused = False  # whether one forward of the model uses this linear several times

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def run(linear: Linear, x: Tensor) -> Tensor:
    """Computes the product, with both gradients in one backward."""
    if linear.op is PLAIN:
        return F.linear(x, linear.weight, linear.bias)
    return _Product.apply(x, linear.weight, linear.bias, linear.op)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        op: LinearOp,
    ) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(weight, *op.saved(x))
        return op.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = ctx.op.input_grad(grad, weight) if needs_x else None
        grad_weight = ctx.op.weight_grad(grad, saved) if needs_weight else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


def apply_linears(x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """Returns the outputs of linears that share an input. Tensor parallelism replaces this
    function, to run the linears as one operation."""
    return [linear(x) for linear in linears]


class Embedding(nn.Module):
    """int64 [...] -> [..., hidden]: rows of weight [rows, hidden]."""

    def __init__(self, rows: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.op: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, index: Tensor) -> Tensor:
        return self.op(index, self.weight)


def identities(count: int) -> list[nn.Module]:
    """Returns modules that parallelism may replace."""
    return [nn.Identity() for _ in range(count)]
