"""Linear operations whose factors are rounded to 8 bits.

A factor is multiplied by a scale and rounded to float8; the product is divided by the scales. It is
computed in fp32 (in fp64 where tensors are): this is what a device's fp8 unit computes, up to the
order of its sums. All three products, the forward one and both gradients, have rounded factors.

    fp8_tensor   one scale per tensor: the largest number of the format over the tensor's largest
                 value (current scaling); weights and inputs in e4m3, gradients in e5m2
    fp8_delayed  the same with the largest value of earlier steps (`delayed`)
    fp8_block    one scale per 128 elements along the dimension that the product sums over, one per
                 128 x 128 of a weight; all in e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3)

A tensor is that of one process: inputs and gradients of a whole micro-batch, the whole weight.
Where ranks hold slices, `Largest` finds the largest values over all of them. `experts` has the
products of experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear import LinearOp
from .rounding import (
    E4M3,
    E5M2,
    UNCUT,
    Dimension,
    Grid,
    Largest,
    Rounded,
    accumulation_dtype,
    round_to,
)

BLOCK = 128  # elements
#: The kernel of fp8 units multiplies matrices whose sizes are multiples of so many elements.
MULTIPLE = 16


Value = TypeVar("Value", Rounded, Tensor)


class LatestCache(Generic[Value]):
    """Caches what was made of the latest tensor: linears that share an input round it once, and so
    do both gradients of a linear."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[Tensor], int, object] | None = None
        self._latest: Value | None = None

    def get(self, x: Tensor, kind: object, make: Callable[[], Value]) -> Value:
        key = self._key
        if (
            self._latest is None
            or key is None
            or key[0]() is not x
            or key[1:] != (x._version, kind)
        ):
            self._latest = make()
            self._key = (weakref.ref(x), x._version, kind)
        return self._latest


class Shared:
    """The caches that the ops of one stage share."""

    def __init__(self) -> None:
        self.inputs = LatestCache[Rounded]()
        self.tokens = LatestCache[Rounded]()
        self.grads = LatestCache[Rounded]()
        self.largest_inputs = LatestCache[Tensor]()
        self.largest_grads = LatestCache[Tensor]()


def same(largest: Tensor) -> Tensor:
    """The largest value of a tensor that no other rank has a slice of."""
    return largest


class TensorOp(LinearOp):
    """Products with one scale per tensor, from its current values. `largest_input`,
    `largest_weight` and `largest_grad` find the largest value over the ranks with slices. With
    `fp8_unit` torch's kernel multiplies the codes, where their sizes suit it."""

    def __init__(
        self,
        shared: Shared,
        largest_input: Largest = same,
        largest_weight: Largest = same,
        largest_grad: Largest = same,
        fp8_unit: bool = False,
    ):
        self.fp8_unit = fp8_unit
        self.shared = shared
        self.largest_input = largest_input
        self.largest_weight = largest_weight
        self.largest_grad = largest_grad

    def _input(self, x: Tensor) -> Rounded:
        return self.shared.inputs.get(
            x,
            self.largest_input,
            lambda: round_to(x, self.largest_input(x.detach().abs().amax()), E4M3),
        )

    def _weight(self, weight: Tensor) -> Rounded:
        return round_to(
            weight.detach(),
            self.largest_weight(weight.detach().abs().amax()),
            E4M3,
        )

    def _grad(self, grad: Tensor) -> Rounded:
        return self.shared.grads.get(
            grad,
            self,
            lambda: round_to(grad, self.largest_grad(grad.abs().amax()), E5M2),
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self._multiply(self._input(x), _transposed(self._weight(weight)), x.dtype)
        # Not in place: selective recomputation keeps the product as it comes.
        return out if bias is None else out + bias

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._input(x)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._multiply(self._grad(grad), self._weight(weight), grad.dtype)

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        codes, unit = saved
        outputs = _transposed(_as_matrix(self._grad(grad)))
        inputs = _as_matrix(Rounded(codes, unit))
        return self._multiply(outputs, inputs, grad.dtype)

    def _multiply(self, row_factor: Rounded, column_factor: Rounded, dtype: torch.dtype) -> Tensor:
        """Multiplies [..., k] and [k, n]: -> [..., n] in `dtype`."""
        sizes = (row_factor.codes.shape[:-1].numel(), *column_factor.codes.shape)
        wide = accumulation_dtype(dtype)
        if self.fp8_unit and wide == torch.float32 and not any(size % MULTIPLE for size in sizes):
            product = F.scaled_mm(
                row_factor.codes.flatten(0, -2).contiguous(),
                column_factor.codes.T.contiguous().T,
                scale_a=row_factor.unit,
                scale_recipe_a=F.ScalingType.TensorWise,
                scale_b=column_factor.unit,
                scale_recipe_b=F.ScalingType.TensorWise,
                output_dtype=dtype,
            )
            # What `view` returns may not be modified in place outside of this operation.
            return torch.ops.aten._unsafe_view(product, (*row_factor.codes.shape[:-1], -1))
        product = row_factor.codes.to(wide) @ column_factor.codes.to(wide)
        return (product * (row_factor.unit * column_factor.unit)).to(dtype)


def _as_matrix(rounded: Rounded) -> Rounded:
    """[..., features] -> [tokens, features]"""
    return Rounded(rounded.codes.flatten(0, -2), rounded.unit)


def _transposed(rounded: Rounded) -> Rounded:
    return Rounded(rounded.codes.T, rounded.unit)


class BlockOp(LinearOp):
    """Products with one scale per 128 elements that they sum over. Inputs are rounded twice: along
    features for the forward product, and along tokens for the weight's gradient. Only the latter
    are kept.

    `tokens` is the dimension of a micro-batch's tokens, `inputs` and `outputs` are those of
    features."""

    def __init__(
        self,
        shared: Shared,
        tokens: Dimension = UNCUT,
        inputs: Dimension = UNCUT,
        outputs: Dimension = UNCUT,
    ):
        self.shared = shared
        self.inputs = Grid(1, BLOCK, column_dimension=inputs)
        self.grads = Grid(1, BLOCK, column_dimension=outputs)
        self.by_token = Grid(BLOCK, 1, tokens)
        self.weights = Grid(BLOCK, BLOCK, outputs, inputs)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = self.shared.inputs.get(
            x,
            self.inputs.dimensions,
            lambda: self.inputs.round(x.flatten(0, -2)),
        )
        dtype = accumulation_dtype(x.dtype)
        values = self.inputs.values(rounded, dtype).view(x.shape)
        out = F.linear(values, self.weights.rounded_values(weight, dtype))
        return (out if bias is None else out + bias).to(x.dtype)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.shared.tokens.get(
            x,
            self.by_token.dimensions,
            lambda: self.by_token.round(x.flatten(0, -2)),
        )

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        dtype = accumulation_dtype(grad.dtype)
        values = self.grads.rounded_values(grad.flatten(0, -2), dtype)
        rounded_weight = self.weights.rounded_values(weight, dtype)
        return (values.view(grad.shape) @ rounded_weight).to(grad.dtype)

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        dtype = accumulation_dtype(grad.dtype)
        values = self.by_token.rounded_values(grad.flatten(0, -2), dtype)
        codes, unit = saved
        inputs = self.by_token.values(Rounded(codes, unit), dtype)
        return (values.T @ inputs).to(grad.dtype)


class SharedHeadsOp(LinearOp):
    """Products with a weight that `ranks` ranks hold alike, each with the gradient of its own
    queries: the gradient is summed over these ranks before it is rounded, and each rank returns its
    share of the results."""

    def __init__(self, op: LinearOp, total: Largest, ranks: int):
        self.op = op
        self.total = total
        self.ranks = ranks
        self.totals = LatestCache[Tensor]()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.op.forward(x, weight, bias)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.op.saved(x)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self.op.input_grad(self._summed(grad), weight) / self.ranks

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        return self.op.weight_grad(self._summed(grad), saved) / self.ranks

    def _summed(self, grad: Tensor) -> Tensor:
        return self.totals.get(grad, None, lambda: self.total(grad))
