"""Linear operations whose factors are rounded to 8 bits (e4m3, e5m2: Micikevicius et al., arXiv
2209.05433).

A factor is multiplied by a scale and rounded to float8; the product is divided by the scales. It is
computed in fp32 (in fp64 where tensors are): this is what a device's fp8 unit computes, up to the
order of its sums. All three products, the forward one and both gradients, have rounded factors.

    fp8_tensor   one scale per tensor: the largest number of the format over the tensor's largest
                 value (current scaling); weights and inputs in e4m3, gradients in e5m2
    fp8_block    one scale per 128 elements along the dimension that the product sums over, one per
                 128 x 128 of a weight; all in e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3)

A tensor is that of one process: inputs and gradients of a whole micro-batch, the whole weight.
Where ranks hold slices, `Largest` finds the largest value over all of them; blocks lie within
slices (`orchestrator.plan.trained` refuses other plans).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import LinearOp

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
BLOCK = 128  # elements
#: Bounds scales, so that they stay finite in fp32 even for a tensor of zeros.
LEAST = 2.0**-100
#: The largest value of this rank's slice, 0-d -> that of the tensor of one process.
Largest = Callable[[Tensor], Tensor]


class Rounded(NamedTuple):
    """A tensor in 8 bits: its values are `codes` * `unit`."""

    codes: Tensor  # float8
    unit: Tensor  # broadcasts against `codes`, or by blocks of it


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def round_to(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
    """Rounds `x` with the scale of `largest`, which broadcasts against it. Larger values become the
    largest number; nan stays."""
    max_code = torch.finfo(dtype).max
    scale = max_code / largest.to(accumulation_dtype(x.dtype)).clamp(min=LEAST)
    return Rounded(
        to_float8((x.to(scale.dtype) * scale).clamp(-max_code, max_code), dtype),
        1 / scale,
    )


def to_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds `x` to float8. torch converts fp64 by way of fp32, which rounds one value in a million
    twice. Here an inexact fp32 value gets an odd last bit, so it is never halfway between two
    numbers of float8."""
    if x.dtype == torch.float64:
        single = x.float()
        bits = single.view(torch.int32) - (single.double().abs() > x.abs()).int()  # towards zero
        x = (bits | (bits.view(torch.float32).double() != x).int()).view(torch.float32)
    return x.to(dtype)


class _RoundedCache:
    """Caches the latest rounded tensor: linears that share an input round it once, and so do both
    gradients of a linear."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[Tensor], int, object] | None = None
        self._rounded: Rounded | None = None

    def get(self, x: Tensor, kind: object, make: Callable[[], Rounded]) -> Rounded:
        key = self._key
        if (
            self._rounded is None
            or key is None
            or key[0]() is not x
            or key[1:] != (x._version, kind)
        ):
            self._rounded = make()
            self._key = (weakref.ref(x), x._version, kind)
        return self._rounded


class Shared:
    """The caches that the ops of one stage share."""

    def __init__(self) -> None:
        self.inputs = _RoundedCache()
        self.tokens = _RoundedCache()
        self.grads = _RoundedCache()


def _same(largest: Tensor) -> Tensor:
    return largest


class TensorOp(LinearOp):
    """Products with one scale per tensor, from its current values. `largest_input`,
    `largest_weight` and `largest_grad` find the largest value over the ranks with slices."""

    def __init__(
        self,
        shared: Shared,
        largest_input: Largest = _same,
        largest_weight: Largest = _same,
        largest_grad: Largest = _same,
    ):
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
        x8, x_unit = self._input(x)
        w8, w_unit = self._weight(weight)
        dtype = accumulation_dtype(x.dtype)
        # Not in place: selective recomputation keeps the product as it comes.
        out = F.linear(x8.to(dtype), w8.to(dtype)) * (x_unit * w_unit)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._input(x)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        g8, g_unit = self._grad(grad)
        w8, w_unit = self._weight(weight)
        dtype = accumulation_dtype(grad.dtype)
        return (g8.to(dtype) @ w8.to(dtype)).mul_(g_unit * w_unit).to(grad.dtype)

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        g8, g_unit = self._grad(grad)
        x8, x_unit = saved
        dtype = accumulation_dtype(grad.dtype)
        product = g8.flatten(0, -2).to(dtype).T @ x8.flatten(0, -2).to(dtype)
        return product.mul_(g_unit * x_unit).to(grad.dtype)


class BlockOp(LinearOp):
    """Products with one scale per 128 elements that they sum over. Inputs are rounded twice: along
    features for the forward product, and along tokens for the weight's gradient. Only the latter
    are kept."""

    def __init__(self, shared: Shared):
        self.shared = shared

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rounded = self.shared.inputs.get(
            x,
            (1, BLOCK),
            lambda: in_blocks(x.flatten(0, -2), 1, BLOCK),
        )
        dtype = accumulation_dtype(x.dtype)
        values = from_blocks(rounded, 1, BLOCK, dtype).view(x.shape)
        out = F.linear(values, _block_weight(weight, dtype))
        return (out if bias is None else out + bias).to(x.dtype)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.shared.tokens.get(
            x,
            (BLOCK, 1),
            lambda: in_blocks(x.flatten(0, -2), BLOCK, 1),
        )

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        dtype = accumulation_dtype(grad.dtype)
        values = from_blocks(
            in_blocks(grad.flatten(0, -2), 1, BLOCK),
            1,
            BLOCK,
            dtype,
        )
        return (values.view(grad.shape) @ _block_weight(weight, dtype)).to(grad.dtype)

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        dtype = accumulation_dtype(grad.dtype)
        values = from_blocks(
            in_blocks(grad.flatten(0, -2), BLOCK, 1),
            BLOCK,
            1,
            dtype,
        )
        codes, unit = saved
        return (values.T @ from_blocks(Rounded(codes, unit), BLOCK, 1, dtype)).to(grad.dtype)


def _block_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the weight, rounded in blocks of 128 x 128."""
    return from_blocks(
        in_blocks(weight.detach(), BLOCK, BLOCK),
        BLOCK,
        BLOCK,
        dtype,
    )


def in_blocks(x: Tensor, rows: int, columns: int) -> Rounded:
    """[m, n] -> codes [m, n] in e4m3, and the units of the blocks [ceil(m / rows), ceil(n /
    columns)]."""
    m, n = x.shape
    padded = F.pad(x.detach().abs(), (0, -n % columns, 0, -m % rows))
    largest = padded.view(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))
    codes, _ = round_to(
        x.detach(),
        _spread(largest, x.shape, rows, columns),
        E4M3,
    )
    return Rounded(
        codes,
        largest.to(accumulation_dtype(x.dtype)).clamp(min=LEAST) / torch.finfo(E4M3).max,
    )


def from_blocks(
    rounded: Rounded,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the values [m, n] of `in_blocks`."""
    return rounded.codes.to(dtype) * _spread(rounded.unit, rounded.codes.shape, rows, columns)


def _spread(blocks: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """One value per block -> one per element, [m, n]."""
    m, n = shape
    by_row = blocks.repeat_interleave(rows, 0)[:m]
    return by_row.repeat_interleave(columns, 1)[:, :n]
