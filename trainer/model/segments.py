"""The experts of a layer, computed one after another, so that an expert's rows stay in the
processor's caches.

It is one operation for autograd, which keeps the experts' inputs and the activation's inputs and
outputs. Gradients of all experts' matrices are written into one tensor, instead of being computed
one by one and stacked. The C library returns such a block to the system when it is freed, so each
backward maps it anew, in huge pages if there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.huge_pages import prefer_huge_pages

from .mlp import ACTIVATIONS, GRADIENTS


def segmented(
    x: Tensor,
    weights: Tensor,
    counts: list[int],
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    activation: str,
) -> Tensor:
    """Computes `Experts`: rows x [n, hidden] sorted by expert, `counts[e]` of them for expert e ->
    [n, hidden].

    gate, up [experts, ffn, hidden], down [experts, hidden, ffn]; results are multiplied by
    `weights` [n].
    """
    return _Segmented.apply(x, weights, gate, up, down, counts, activation)


class _Segmented(torch.autograd.Function):
    """The experts' forward and backward, over one segment of rows per expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        counts: list[int],
        activation: str,
    ) -> Tensor:
        up_out = x.new_empty(len(x), up.shape[1])
        gate_out = None if gate is None else torch.empty_like(up_out)
        out = x.new_empty(len(x), down.shape[1])
        unweighted = torch.empty_like(out) if _weighs_results(down) else None
        activated = []
        segments = _segments(
            (
                x,
                weights[:, None],
                gate_out,
                up_out,
                unweighted,
                out,
            ),
            counts,
        )
        matrices = _matrices((gate, up, down), counts)
        for rows, expert in zip(segments, matrices, strict=True):
            activated.append(_forward_segment(*rows, *expert, activation=activation))
        ctx.save_for_backward(
            x,
            weights,
            gate_out,
            up_out,
            unweighted,
            gate,
            up,
            down,
            *activated,
        )
        ctx.counts = counts
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_out, up_out, unweighted, gate, up, down, *activated = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weights = torch.empty_like(weights)
        grad_gate, grad_up, grad_down = (
            None if matrices is None or not need else prefer_huge_pages(torch.empty_like(matrices))
            for matrices, need in zip((gate, up, down), ctx.needs_input_grad[2:5], strict=True)
        )
        inputs = (grad, x, weights[:, None], gate_out, up_out, unweighted)
        segments = _segments((*inputs, grad_x, grad_weights), ctx.counts)
        matrices = _matrices(
            (
                gate,
                up,
                down,
                grad_gate,
                grad_up,
                grad_down,
            ),
            ctx.counts,
        )
        for rows, expert, active in zip(segments, matrices, activated, strict=True):
            segment = _SegmentBackward._make((*rows, active))
            segment.compute(_Expert(*expert), GRADIENTS[ctx.activation])
        return grad_x, grad_weights, grad_gate, grad_up, grad_down, None, None


def _forward_segment(
    x: Tensor,
    weight: Tensor,
    gate_out: Tensor | None,
    up_out: Tensor,
    unweighted: Tensor | None,
    out: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    *,
    activation: str,
) -> Tensor:
    """Computes one expert's rows: writes `gate_out`, `up_out`, `unweighted` and `out`. Returns the
    output of the activation."""
    torch.mm(x, up.T, out=up_out)
    if gate is None or gate_out is None:
        active = ACTIVATIONS[activation](up_out)
        inner = active.clone()
    else:
        torch.mm(x, gate.T, out=gate_out)
        active = ACTIVATIONS[activation](gate_out)
        inner = active * up_out
    if unweighted is not None:
        torch.mul(torch.mm(inner, down.T, out=unweighted), weight, out=out)
    else:
        torch.mm(inner.mul_(weight), down.T, out=out)
    return active


class _Expert(NamedTuple):
    """One expert's matrices, and where their gradients are written (None: not needed)."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    grad_gate: Tensor | None
    grad_up: Tensor | None
    grad_down: Tensor | None


class _SegmentBackward(NamedTuple):
    """The rows of one expert in backward."""

    grad: Tensor  # [rows, hidden], of the outputs
    x: Tensor
    weight: Tensor  # [rows, 1]
    gate_out: Tensor | None  # [rows, ffn]
    up_out: Tensor
    unweighted: Tensor | None  # outputs before the weight, if it multiplies outputs
    grad_x: Tensor  # written
    grad_weight: Tensor  # [rows], written
    active: Tensor  # output of the activation

    def compute(self, expert: _Expert, gradient: Callable[..., Tensor]) -> None:
        """Writes the gradients of the rows, of their weights and of the expert's matrices."""
        inner = self.active.clone() if expert.gate is None else self.active * self.up_out
        grad, grad_inner = self._through_down(expert.down, inner)
        if expert.grad_down is not None:
            torch.mm(grad.T, inner, out=expert.grad_down)
        if expert.gate is None:
            grad_up_out = gradient(grad_inner, self.up_out, grad_input=grad_inner)
            torch.mm(grad_up_out, expert.up, out=self.grad_x)
        else:
            grad_up_out = torch.mul(self.active, grad_inner, out=inner)
            gradient(grad_inner.mul_(self.up_out), self.gate_out, grad_input=grad_inner)
            torch.mm(grad_up_out, expert.up, out=self.grad_x).addmm_(grad_inner, expert.gate)
        if expert.grad_gate is not None:
            torch.mm(grad_inner.T, self.x, out=expert.grad_gate)
        if expert.grad_up is not None:
            torch.mm(grad_up_out.T, self.x, out=expert.grad_up)

    def _through_down(self, down: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of the last product and of its input `inner`, which is multiplied
        by the weight in place if that came before the product. Writes the weight's gradient."""
        dtype = self.grad_weight.dtype
        if self.unweighted is not None:
            torch.sum(
                self.grad.to(dtype) * self.unweighted,
                -1,
                out=self.grad_weight,
            )
            grad = (self.grad * self.weight).to(self.grad.dtype)
            return grad, torch.mm(grad, down)
        grad_inner = torch.mm(self.grad, down)
        torch.sum(grad_inner.to(dtype) * inner, -1, out=self.grad_weight)
        inner.mul_(self.weight)
        grad_inner.mul_(self.weight)
        return self.grad, grad_inner


def _weighs_results(down: Tensor) -> bool:
    """Whether the weights of choices multiply the experts' outputs, because these are narrower than
    the inputs of the last product. Otherwise they multiply those inputs, so that no outputs are
    kept."""
    return down.shape[1] < down.shape[2]


def _segments(tensors: Sequence[Tensor | None], counts: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of each expert in every tensor; None for a tensor that is None."""
    missing = [None] * len(counts)
    columns = (missing if rows is None else rows.split(counts) for rows in tensors)
    return zip(*columns, strict=True)


def _matrices(tensors: Sequence[Tensor | None], counts: list[int]) -> Iterator[tuple[Any, ...]]:
    """Yields each expert's matrix in every tensor; None for a tensor that is None."""
    missing = [None] * len(counts)
    columns = (missing if weights is None else weights.unbind(0) for weights in tensors)
    return zip(*columns, strict=True)
