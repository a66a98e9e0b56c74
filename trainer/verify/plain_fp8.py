"""Products in 8 bits as one process computes them, from the definition of the formats: without
torch's float8 and without shared code.

A number of e4m3 has 3 bits after its leading one, exponents from -6 and 448 as its largest; e5m2
has 2, -14 and 57344 (arXiv 2209.05433, table 1). Each micro-batch is scaled as a tensor of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from orchestrator.plan.document import Matmul
from trainer.model.experts import Experts
from trainer.model.linear import Linear
from trainer.model.mlp import ACTIVATIONS
from trainer.model.stage import Stage
from trainer.model.state import State, add_state

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
SIDE = 128


def nearest(x: Tensor, name: str) -> Tensor:
    """Rounds to the nearest number of the format, ties to even as fp32 sees them; larger numbers
    become the largest."""
    x = x.float().to(x.dtype)
    bits, lowest_exponent, highest = FORMATS[name]
    _, exponent = torch.frexp(x)  # x = mantissa * 2**exponent, 0.5 <= mantissa < 1
    step = torch.exp2((exponent - 1).clamp(min=lowest_exponent).to(x.dtype) - bits)
    return ((x / step).round() * step).clamp(-highest, highest)


def scaled(x: Tensor, name: str) -> Tensor:
    """Rounds `x` with one scale."""
    largest = x.abs().max() if x.numel() else x.new_zeros(())
    if largest == 0:
        return x
    scale = FORMATS[name][2] / largest
    return nearest(x * scale, name) / scale


def by_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Rounds `x` [m, n] to e4m3 with one scale for each block; blocks at the end may be
    smaller."""
    m, n = x.shape
    padded = torch.zeros(
        -(-m // rows) * rows,
        -(-n // columns) * columns,
        dtype=x.dtype,
    )
    padded[:m, :n] = x
    # [blocks down, blocks across, rows, columns]
    blocks = padded.unfold(0, rows, rows).unfold(1, columns, columns)
    largest = blocks.abs().amax((2, 3), keepdim=True)
    scale = FORMATS["e4m3"][2] / largest.where(largest > 0, 1.0)
    rounded = nearest(blocks * scale, "e4m3") / scale
    return rounded.transpose(1, 2).reshape(rounded.shape[0] * rows, -1)[:m, :n]


class Tensors:
    """Rounds the factors of a linear's products, each with one scale."""

    def input(self, rows: Tensor) -> Tensor:
        return scaled(rows, "e4m3")

    def kept_input(self, rows: Tensor) -> Tensor:
        """The input as the weight's gradient reads it."""
        return self.input(rows)

    def weight(self, weight: Tensor) -> Tensor:
        return scaled(weight, "e4m3")

    def grad(self, rows: Tensor) -> Tensor:
        return scaled(rows, "e5m2")

    def kept_grad(self, rows: Tensor) -> Tensor:
        """The output's gradient as the weight's gradient reads it."""
        return self.grad(rows)


class Blocks(Tensors):
    """Rounds them with one scale per 128 elements that a product sums over."""

    def input(self, rows: Tensor) -> Tensor:
        return by_blocks(rows, 1, SIDE)

    def kept_input(self, rows: Tensor) -> Tensor:
        return by_blocks(rows, SIDE, 1)

    def weight(self, weight: Tensor) -> Tensor:
        return by_blocks(weight, SIDE, SIDE)

    def grad(self, rows: Tensor) -> Tensor:
        return by_blocks(rows, 1, SIDE)

    def kept_grad(self, rows: Tensor) -> Tensor:
        return by_blocks(rows, SIDE, 1)


class Delayed(Tensors):
    """Rounds the factors of one linear with the scales of their largest values in earlier steps, of
    which the linear has 16 of each, newest first; in the first step with those of their own."""

    def __init__(self, linear: Linear):
        self.linear = linear
        self.step: list[list[float]] = [[], [], []]  # of inputs, weights and gradients
        add_state(linear, "largest", State((3, 16)))

    def input(self, rows: Tensor) -> Tensor:
        return self._round(0, rows, "e4m3")

    def weight(self, weight: Tensor) -> Tensor:
        return self._round(1, weight, "e4m3")

    def grad(self, rows: Tensor) -> Tensor:
        return self._round(2, rows, "e5m2")

    def _round(self, factor: int, x: Tensor, name: str) -> Tensor:
        self.step[factor].append(float(x.abs().max()))
        history = cast(Tensor, self.linear.largest)
        if not history.any():
            return scaled(x, name)
        largest = history[factor].double().max()
        if largest == 0:
            return nearest(x, name)
        scale = FORMATS[name][2] / largest
        return nearest(x * scale, name) / scale

    def move(self) -> None:
        """Ends a step."""
        history = cast(Tensor, self.linear.largest)
        for factor, values in enumerate(self.step):
            history[factor] = history[factor].roll(1)
            history[factor, 0] = max(values)
            values.clear()


def use(
    stage: Stage,
    matmul: Matmul,
    micro_batch_size: int,
    wide: Sequence[str] = (),
) -> list[Delayed]:
    """Rounds the products of every block's linears but those in `wide` (`train.matmul_wide`); the
    gradient passes the rounding unchanged. Returns the roundings that keep largest values over
    steps."""
    histories = list[Delayed]()
    for layer, block in stage.blocks.items():
        patterns = [_without_ends(pattern, stage.model.layers) for pattern in wide]
        for name, module in block.named_modules():
            if isinstance(module, Experts):
                matrices = ("gate", "up", "down")
                wide_matrices = {m for m in matrices if _stays_wide(f"{name}.{m}", layer, patterns)}
                module.forward = _ExpertByExpert(  # type: ignore[method-assign]
                    module, matmul, wide_matrices
                )
            if isinstance(module, Linear) and not _stays_wide(name, layer, patterns):
                rounding = _rounding(module, matmul)
                module.run = partial(_run, rounding, micro_batch_size)
                if isinstance(rounding, Delayed):
                    histories.append(rounding)
    return histories


def _without_ends(pattern: str, layers: int) -> str:
    """`first` and `last`, alone or before a name, as numbers of layers."""
    return re.sub("^last", str(layers - 1), re.sub("^first", "0", pattern))


def _stays_wide(name: str, layer: int, patterns: Sequence[str]) -> bool:
    path = f"{layer}.{name}"  # 3.mlp.down
    for pattern in patterns:
        if pattern == str(layer) or re.fullmatch(rf"\d+\.(.*\.)?{re.escape(pattern)}", path):
            return True
        number, _, rest = pattern.partition(".")
        if number == str(layer) and re.fullmatch(rf"\d+\.(.*\.)?{re.escape(rest)}", path):
            return True
    return False


def _run(
    rounding: Tensors,
    micro_batch_size: int,
    linear: Linear,
    x: Tensor,
) -> Tensor:
    """A `Linear.run`."""
    return _Rounded.apply(
        x,
        linear.weight,
        linear.bias,
        rounding,
        micro_batch_size,
    )


def _rounding(linear: Linear, matmul: Matmul) -> Tensors:
    if matmul == "fp8_delayed":
        return Delayed(linear)
    return Blocks() if matmul == "fp8_block" else Tensors()


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rounding: Tensors,
        size: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding = rounding
        ctx.size = size
        weight = rounding.weight(weight)
        outputs = []
        for inputs in x.split(size):
            rows = rounding.input(inputs.reshape(-1, inputs.shape[-1]))
            outputs.append((rows @ weight.T).view(*inputs.shape[:-1], -1))
        out = torch.cat(outputs)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rounding: Tensors = ctx.rounding
        rounded = rounding.weight(weight)
        input_grads = []
        weight_grad = torch.zeros_like(weight)
        for grads, inputs in zip(grad.split(ctx.size), x.split(ctx.size), strict=True):
            g = grads.reshape(-1, grads.shape[-1])
            rows = inputs.reshape(-1, inputs.shape[-1])
            input_grads.append((rounding.grad(g) @ rounded).view_as(inputs))
            weight_grad += rounding.kept_grad(g).T @ rounding.kept_input(rows)
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return torch.cat(input_grads), weight_grad, bias_grad, None, None


class _ExpertByExpert:
    """Replaces the forward of experts: one expert after the other, each row scaled for itself."""

    def __init__(self, experts: Experts, matmul: Matmul, wide: Collection[str] = ()):
        self.experts = experts
        self.matmul = matmul
        self.wide = wide

    def __call__(self, x: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        experts = self.experts
        act = ACTIVATIONS[experts.activation]
        outputs = []
        start = 0
        for expert, count in enumerate(counts.tolist()):
            rows = x[start : start + count]
            up = self._product(rows, experts.up.weight[expert], "up")
            if experts.gate is None:
                inner = act(up)
            else:
                inner = act(self._product(rows, experts.gate.weight[expert], "gate")) * up
            weighted = inner * weights[start : start + count, None]
            outputs.append(self._product(weighted, experts.down.weight[expert], "down"))
            start += count
        return torch.cat(outputs)

    def _product(self, rows: Tensor, weight: Tensor, name: str) -> Tensor:
        if name in self.wide:
            return rows @ weight.T
        return _RoundedRows.apply(
            rows,
            weight,
            self.matmul == "fp8_block",
        )


class _RoundedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, block: bool) -> Tensor:
        rounded = by_rows(rows, "e4m3", block)
        weight = by_blocks(weight, SIDE, SIDE) if block else scaled(weight, "e4m3")
        ctx.save_for_backward(rounded, weight)
        ctx.block = block
        return rounded @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        rounded = by_rows(grad, "e4m3" if ctx.block else "e5m2", ctx.block)
        return rounded @ weight, rounded.T @ rows, None


def by_rows(rows: Tensor, name: str, block: bool) -> Tensor:
    """Rounds each row with a scale of its own, or with one for each block of it."""
    if len(rows) == 0:
        return rows
    if block:
        return by_blocks(rows, 1, SIDE)
    return torch.stack([scaled(row, name) for row in rows])
