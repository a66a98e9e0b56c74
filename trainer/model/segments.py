"""The experts of a layer one after another: everything of one is computed while its rows are in the
processor's caches.

One operation for autograd, which keeps the experts' inputs and the activation's inputs and outputs.
Gradients of all experts' matrices are written where they stay, instead of being computed one by one
and stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
    """Rows sorted by expert, x [n, hidden], `counts[e]` of them for expert e -> [n, hidden]: what
    `Experts` computes.

    gate, up [experts, ffn, hidden], down [experts, hidden, ffn]; results are multiplied by
    `weights` [n].
    """
    return _Segmented.apply(x, weights, gate, up, down, counts, activation)


class _Segmented(torch.autograd.Function):
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
        raised = x.new_empty(len(x), up.shape[1])
        gates = None if gate is None else torch.empty_like(raised)
        out = x.new_empty(len(x), down.shape[1])
        actives = []
        unweighted = torch.empty_like(out) if _weighs_results(down) else None
        of_rows = (x, weights[:, None], gates, raised, unweighted, out)
        rows = zip(*(_segments(one, counts) for one in of_rows), strict=True)
        matrices = zip(*(_matrices(one, counts) for one in (gate, up, down)), strict=True)
        for (x_e, weight_e, gate_e, up_e, plain_e, out_e), (gate_m, up_m, down_m) in zip(
            rows, matrices, strict=True
        ):
            torch.mm(x_e, up_m.T, out=up_e)
            if gate_m is not None:
                torch.mm(x_e, gate_m.T, out=gate_e)
            actives.append(ACTIVATIONS[activation](up_e if gate_m is None else gate_e))
            inner = actives[-1].clone() if gate_m is None else actives[-1] * up_e
            if plain_e is not None:
                torch.mul(torch.mm(inner, down_m.T, out=plain_e), weight_e, out=out_e)
            else:
                torch.mm(inner.mul_(weight_e), down_m.T, out=out_e)
        ctx.save_for_backward(x, weights, gates, raised, unweighted, gate, up, down, *actives)
        ctx.counts = counts
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gates, raised, unweighted, gate, up, down, *actives = ctx.saved_tensors
        counts = ctx.counts
        gradient = GRADIENTS[ctx.activation]
        of_x = torch.empty_like(x)
        of_weights = torch.empty_like(weights)
        of_gate, of_up, of_down = (
            None if one is None or not need else torch.empty_like(one)
            for one, need in zip((gate, up, down), ctx.needs_input_grad[2:5], strict=True)
        )
        of_rows = (grad, x, weights[:, None], gates, raised, unweighted, of_x, of_weights)
        rows = zip(*(_segments(one, counts) for one in of_rows), actives, strict=True)
        matrices = zip(
            *(_matrices(one, counts) for one in (gate, up, down, of_gate, of_up, of_down)),
            strict=True,
        )
        for segment, of_expert in zip(rows, matrices, strict=True):
            grad_e, x_e, weight_e, gate_e, up_e, plain_e, of_x_e, of_weights_e, active = segment
            gate_m, up_m, down_m, of_gate_m, of_up_m, of_down_m = of_expert
            inner = active.clone() if gate_m is None else active * up_e
            if plain_e is not None:
                torch.sum(grad_e.to(weights.dtype) * plain_e, -1, out=of_weights_e)
                grad_e = (grad_e * weight_e).to(grad_e.dtype)
                of_inner = torch.mm(grad_e, down_m)
            else:
                of_inner = torch.mm(grad_e, down_m)
                torch.sum(of_inner.to(weights.dtype) * inner, -1, out=of_weights_e)
                inner.mul_(weight_e)
                of_inner.mul_(weight_e)
            if of_down_m is not None:
                torch.mm(grad_e.T, inner, out=of_down_m)
            if gate_m is None:
                of_raised = gradient(of_inner, up_e, grad_input=of_inner)
                torch.mm(of_raised, up_m, out=of_x_e)
            else:
                of_raised = torch.mul(active, of_inner, out=inner)
                gradient(of_inner.mul_(up_e), gate_e, grad_input=of_inner)
                torch.mm(of_raised, up_m, out=of_x_e).addmm_(of_inner, gate_m)
            if of_gate_m is not None:
                torch.mm(of_inner.T, x_e, out=of_gate_m)
            if of_up_m is not None:
                torch.mm(of_raised.T, x_e, out=of_up_m)
        return of_x, of_weights, of_gate, of_up, of_down, None, None


def _weighs_results(down: Tensor) -> bool:
    """Whether choices' weights multiply results, which are narrower here; else what comes before
    the last product, so that no results are kept."""
    return down.shape[1] < down.shape[2]


def _segments(rows: Tensor | None, counts: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(counts) if rows is None else rows.split(counts)


def _matrices(weights: Tensor | None, counts: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(counts) if weights is None else weights.unbind(0)
