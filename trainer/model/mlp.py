"""The feed-forward part of a dense layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Model

from .linear import Linear, apply_linears

#: gelu in GPT-2's form, the tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415), and
#: exactly, with the error function, as in BERT.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
}
#: (gradient of the output, input, grad_input=the tensor to write) -> gradient of the input
GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu_backward.grad_input,
    "gelu": partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    "gelu_erf": torch.ops.aten.gelu_backward.grad_input,
}


class MLP(nn.Module):
    """[b, s, hidden] -> [b, s, hidden] without the output bias.

    plain: down(act(up(x))); gated: down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202).
    """

    def __init__(self, model: Model, width: int):
        super().__init__()
        self.gate = Linear(model.hidden, width, model.bias) if model.mlp == "gated" else None
        self.up = Linear(model.hidden, width, model.bias)
        self.down = Linear(width, model.hidden)
        self.out_bias = nn.Parameter(torch.empty(model.hidden)) if model.bias else None
        self.activation = model.activation
        self.apply_linears = apply_linears

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            (up,) = self.apply_linears(x, (self.up,))
            return self.down(ACTIVATIONS[self.activation](up))
        gate, up = self.apply_linears(x, (self.gate, self.up))
        return self.down(gated(gate, up, self.activation))


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Returns activation(gate) * up."""
    if torch.compiler.is_compiling():  # one kernel, and one of its backward
        return ACTIVATIONS[activation](gate) * up
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    """A product that saves only its two inputs: backward recomputes the activation."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_up = ACTIVATIONS[ctx.activation](gate).mul_(grad)
        grad_gate = grad * up
        GRADIENTS[ctx.activation](grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad_up, None
