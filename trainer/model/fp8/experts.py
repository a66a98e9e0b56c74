"""Products of experts whose factors are rounded to 8 bits.

Every row of a factor has scales of its own, since the rows of an expert come from micro-batches of
several ranks: so the result does not depend on which rows meet on a rank.

    fp8_tensor   one scale per row of inputs and gradients, one per expert's matrix
    fp8_block    one per 128 elements of a row, one per 128 x 128 of a matrix

A weight's gradient sums over rows. An fp8 unit cannot apply a scale per row to such a sum, so its
factors are the rounded rows, widened again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .linears import BLOCK, Shared
from .rounding import E4M3, E5M2, UNCUT, Dimension, Grid, Rounded, Stack, accumulation_dtype


class ExpertOp:
    """The product of rows, expert after expert, and the experts' matrices. `inputs` and `outputs`
    are the dimensions of their features; `sizes` is (inputs, outputs) of the whole matrices, of
    which tensor-parallel ranks may hold slices."""

    def __init__(
        self,
        shared: Shared,
        matmul: str,
        experts: int,
        sizes: tuple[int, int],
        inputs: Dimension = UNCUT,
        outputs: Dimension = UNCUT,
    ):
        in_blocks = matmul == "fp8_block"
        input_size, output_size = (BLOCK, BLOCK) if in_blocks else sizes
        self.shared = shared
        self.grad_code = E4M3 if in_blocks else E5M2
        self.inputs = Grid(1, input_size, column_dimension=inputs)
        self.grads = Grid(1, output_size, column_dimension=outputs)
        self.weights = Grid(output_size, input_size, Stack(experts, outputs), inputs)

    def __call__(self, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """x [n, in] sorted by expert, weight [experts, out, in] -> [n, out]"""
        return _Product.apply(x, weight, counts, self)

    def input(self, x: Tensor) -> Rounded:
        return self.shared.inputs.get(
            x,
            self.inputs.dimensions,
            lambda: self.inputs.round(x),
        )

    def weight_values(self, weight: Tensor) -> Tensor:
        dtype = accumulation_dtype(weight.dtype)
        return self.weights.rounded_values(weight.flatten(0, 1), dtype).view_as(weight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], op: ExpertOp) -> Tensor:
        rounded = op.input(x)
        ctx.save_for_backward(weight, *rounded)
        ctx.counts = counts
        ctx.op = op
        values = op.inputs.values(rounded, accumulation_dtype(x.dtype))
        return _multiply(values, op.weight_values(weight).mT, counts).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, unit = ctx.saved_tensors
        op = ctx.op
        dtype = accumulation_dtype(grad.dtype)
        grads = op.grads.rounded_values(grad, dtype, op.grad_code)
        inputs = op.inputs.values(Rounded(codes, unit), dtype)
        input_grad = _multiply(grads, op.weight_values(weight), ctx.counts).to(grad.dtype)
        weight_grad = torch.empty_like(weight)
        segments = zip(
            grads.split(ctx.counts),
            inputs.split(ctx.counts),
            weight_grad,
            strict=True,
        )
        for expert_grads, expert_inputs, total in segments:
            total.copy_(expert_grads.T @ expert_inputs)
        return input_grad, weight_grad, None, None


def _multiply(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """Multiplies each expert's rows [n, in] by its matrix, [experts, in, out] -> [n, out]."""
    out = rows.new_empty(len(rows), matrices.shape[-1])
    segments = zip(rows.split(counts), matrices, out.split(counts), strict=True)
    for expert_rows, matrix, product in segments:
        torch.mm(expert_rows, matrix, out=product)
    return out


def expert_by_expert(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """Computes what `ExpertOp` does without rounding, for a matrix that stays wide in a layer whose
    others do not."""
    segments = zip(x.split(counts), weight, strict=True)
    return torch.cat([expert_rows @ matrix.T for expert_rows, matrix in segments])
