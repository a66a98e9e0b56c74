"""Linear operations whose factors are rounded to 8 bits (e4m3, e5m2: Micikevicius et al., arXiv
2209.05433).

A factor is multiplied by a scale, rounded to float8 and divided by the scale again after the
product, which is taken in fp32 (in fp64 where tensors are): what a device's fp8 unit computes but
for the order of its sums. All three products, the forward one and both gradients, have rounded
factors.

    fp8_tensor   one scale for a tensor: the largest number of the format over the tensor's largest
        value (current
                 scaling); weights and inputs in e4m3, gradients in e5m2
    fp8_block    one scale for 128 elements along the dimension that the product sums over, one for
        128 x 128 of a
                 weight; all in e4m3 (DeepSeek-V3, arXiv 2412.19437, section 3.3)

A tensor is that of one process: inputs and gradients of a whole micro-batch, the whole weight.
Where ranks hold slices, `largest` finds the largest value over all; blocks lie inside of slices
(`orchestrator.plan.trained` refuses others).
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
#: Scales stay finite in fp32 even of a tensor of zeros.
LEAST = 2.0**-100
#: The largest value of one process's tensor, 0-d, from that of this rank's slice.
Largest = Callable[[Tensor], Tensor]


class Rounded(NamedTuple):
    """A tensor in 8 bits: its values are `codes` * `unit`."""

    codes: Tensor  # float8
    unit: Tensor  # broadcasts against `codes`, or by blocks of it


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the products are taken."""
    return torch.promote_types(dtype, torch.float32)


def round_to(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
    """`largest` broadcasts against `x`. Larger values become the largest number; nan stays."""
    max_code = torch.finfo(dtype).max
    scale = max_code / largest.to(accumulation_dtype(x.dtype)).clamp(min=LEAST)
    return Rounded(
        to_float8((x.to(scale.dtype) * scale).clamp(-max_code, max_code), dtype), 1 / scale
    )


def to_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` to float8. torch goes from fp64 over fp32, so that one in a million is rounded twice:
    here fp32 gets an odd last bit where it is not exact, which is never halfway between two numbers
    of float8."""
    if x.dtype == torch.float64:
        single = x.float()
        bits = single.view(torch.int32) - (single.double().abs() > x.abs()).int()  # towards zero
        x = (bits | (bits.view(torch.float32).double() != x).int()).view(torch.float32)
    return x.to(dtype)


class _Latest:
    """What was last made of a tensor: linears that share an input, and both gradients, round it
    once."""

    def __init__(self) -> None:
        self._key: tuple[weakref.ref[Tensor], int, object] | None = None
        self._made: Rounded | None = None

    def get(self, x: Tensor, kind: object, make: Callable[[], Rounded]) -> Rounded:
        key = self._key
        if self._made is None or key is None or key[0]() is not x or key[1:] != (x._version, kind):
            self._made = make()
            self._key = (weakref.ref(x), x._version, kind)
        return self._made


class Shared:
    """What the ops of one stage have in common."""

    def __init__(self) -> None:
        self.inputs = _Latest()
        self.tokens = _Latest()
        self.grads = _Latest()


def _same(largest: Tensor) -> Tensor:
    return largest


class TensorOp(LinearOp):
    """One scale a tensor, from its values as they are. `of_input`, `of_weight`, `of_grad`: over
    which ranks."""

    def __init__(
        self,
        shared: Shared,
        of_input: Largest = _same,
        of_weight: Largest = _same,
        of_grad: Largest = _same,
    ):
        self.shared = shared
        self.of_input = of_input
        self.of_weight = of_weight
        self.of_grad = of_grad

    def _input(self, x: Tensor) -> Rounded:
        return self.shared.inputs.get(
            x, self.of_input, lambda: round_to(x, self.of_input(x.detach().abs().amax()), E4M3)
        )

    def _weight(self, weight: Tensor) -> Rounded:
        return round_to(weight.detach(), self.of_weight(weight.detach().abs().amax()), E4M3)

    def _grad(self, grad: Tensor) -> Rounded:
        return self.shared.grads.get(
            grad, self, lambda: round_to(grad, self.of_grad(grad.abs().amax()), E5M2)
        )

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (x8, of_x), (w8, of_w), kind = (
            self._input(x),
            self._weight(weight),
            accumulation_dtype(x.dtype),
        )
        # Not in place: selective recomputation keeps the product as it comes.
        out = F.linear(x8.to(kind), w8.to(kind)) * (of_x * of_w)
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._input(x)

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        (g8, of_g), (w8, of_w), kind = (
            self._grad(grad),
            self._weight(weight),
            accumulation_dtype(grad.dtype),
        )
        return (g8.to(kind) @ w8.to(kind)).mul_(of_g * of_w).to(grad.dtype)

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        (g8, of_g), (x8, of_x), kind = self._grad(grad), saved, accumulation_dtype(grad.dtype)
        return (
            (g8.flatten(0, -2).to(kind).T @ x8.flatten(0, -2).to(kind))
            .mul_(of_g * of_x)
            .to(grad.dtype)
        )


class BlockOp(LinearOp):
    """One scale for every 128 elements that a product sums over. Inputs are rounded once along
    features, for the forward product, and once along tokens, for the weight's gradient; only the
    latter are kept."""

    def __init__(self, shared: Shared):
        self.shared = shared

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        values = self.shared.inputs.get(
            x, (1, BLOCK), lambda: in_blocks(x.flatten(0, -2), 1, BLOCK)
        )
        kind = accumulation_dtype(x.dtype)
        out = F.linear(
            from_blocks(values, 1, BLOCK, kind).view(x.shape), _block_weight(weight, kind)
        )
        return (out if bias is None else out + bias).to(x.dtype)

    def saved(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.shared.tokens.get(x, (BLOCK, 1), lambda: in_blocks(x.flatten(0, -2), BLOCK, 1))

    def input_grad(self, grad: Tensor, weight: Tensor) -> Tensor:
        kind = accumulation_dtype(grad.dtype)
        values = from_blocks(in_blocks(grad.flatten(0, -2), 1, BLOCK), 1, BLOCK, kind)
        return (values.view(grad.shape) @ _block_weight(weight, kind)).to(grad.dtype)

    def weight_grad(self, grad: Tensor, saved: Sequence[Tensor]) -> Tensor:
        kind = accumulation_dtype(grad.dtype)
        values = from_blocks(in_blocks(grad.flatten(0, -2), BLOCK, 1), BLOCK, 1, kind)
        codes, unit = saved
        return (values.T @ from_blocks(Rounded(codes, unit), BLOCK, 1, kind)).to(grad.dtype)


def _block_weight(weight: Tensor, kind: torch.dtype) -> Tensor:
    """The weight as blocks of 128 x 128 hold it."""
    return from_blocks(in_blocks(weight.detach(), BLOCK, BLOCK), BLOCK, BLOCK, kind)


def in_blocks(x: Tensor, rows: int, columns: int) -> Rounded:
    """[m, n] -> codes [m, n] in e4m3, and a unit [ceil(m / rows), ceil(n / columns)] for each
    block."""
    m, n = x.shape
    padded = F.pad(x.detach().abs(), (0, -n % columns, 0, -m % rows))
    largest = padded.view(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))
    codes, _ = round_to(x.detach(), _spread(largest, x.shape, rows, columns), E4M3)
    return Rounded(
        codes, largest.to(accumulation_dtype(x.dtype)).clamp(min=LEAST) / torch.finfo(E4M3).max
    )


def from_blocks(rounded: Rounded, rows: int, columns: int, kind: torch.dtype) -> Tensor:
    """The values [m, n] of `in_blocks`."""
    return rounded.codes.to(kind) * _spread(rounded.unit, rounded.codes.shape, rows, columns)


def _spread(blocks: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """One value a block -> one an element."""
    return blocks.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[
        :, : shape[1]
    ]
