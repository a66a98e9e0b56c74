"""Ops that compute wide products, and measure how far products in 8 bits are from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.plan.parity import HOPELESS
from trainer.model.experts import GroupedOp
from trainer.model.fp8.experts import expert_by_expert
from trainer.model.linear import PLAIN, LinearOp


class RelativeError:
    """The root of the sum of squared differences over that of squared wide numbers."""

    def __init__(self) -> None:
        self.squared_differences = 0.0
        self.squares = 0.0

    def add(self, narrow: Tensor, wide: Tensor) -> None:
        """Adds a product in 8 bits and the same product computed wide."""
        self.squared_differences += float((narrow - wide).double().square().sum())
        self.squares += float(wide.double().square().sum())

    @property
    def value(self) -> float:
        """The error; 0 of a product that is zero, HOPELESS if a number is not finite."""
        error = (self.squared_differences / self.squares) ** 0.5 if self.squares else 0.0
        return error if math.isfinite(error) else HOPELESS


class ProductErrors:
    """The errors of a linear's three products."""

    def __init__(self) -> None:
        self.forward = RelativeError()
        self.input_grad = RelativeError()
        self.weight_grad = RelativeError()


class MeasuredOp(LinearOp):
    """Wide products of a linear, each compared with that of `narrow`."""

    def __init__(self, narrow: LinearOp, errors: ProductErrors):
        self.narrow = narrow
        self.errors = errors

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = PLAIN.forward(x, weight, None)
        self.errors.forward.add(self.narrow.forward(x, weight, None), wide)
        return wide if bias is None else wide + bias

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        wide = PLAIN.input_grad(grad, weight)
        self.errors.input_grad.add(self.narrow.input_grad(grad, weight), wide)
        return wide

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        (x,) = saved
        wide = PLAIN.weight_grad(grad, saved)
        narrow = self.narrow.weight_grad(grad, self.narrow.saved(x))
        self.errors.weight_grad.add(narrow, wide)
        return wide


class MeasuredExperts:
    """Wide products of experts, each compared with that of `narrow`."""

    def __init__(self, narrow: GroupedOp, errors: ProductErrors):
        self.narrow = narrow
        self.errors = errors

    def __call__(self, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        return _MeasuredProduct.apply(x, weight, counts, self)


class _MeasuredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: list[int],
        op: MeasuredExperts,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        ctx.op = op
        wide = expert_by_expert(x, weight, counts)
        op.errors.forward.add(op.narrow(x, weight, counts), wide)
        return wide

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        op = ctx.op
        wide = _gradients(expert_by_expert, x, weight, ctx.counts, grad)
        narrow = _gradients(op.narrow, x, weight, ctx.counts, grad)
        op.errors.input_grad.add(narrow[0], wide[0])
        op.errors.weight_grad.add(narrow[1], wide[1])
        return *wide, None, None


def _gradients(
    product: GroupedOp,
    x: Tensor,
    weight: Tensor,
    counts: list[int],
    grad: Tensor,
) -> tuple[Tensor, ...]:
    """Returns the gradients of the rows and of the matrices."""
    rows = x.detach().requires_grad_()
    matrices = weight.detach().requires_grad_()
    with torch.enable_grad():
        out = product(rows, matrices, counts)
    return torch.autograd.grad(out, (rows, matrices), grad)
