"""The feed-forward part of a dense layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Model

from .linear import Linear, apply_linears

#: gelu in GPT-2's form, the tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


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
        self.activation = ACTIVATIONS[model.activation]
        self.apply_linears = apply_linears

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            (up,) = self.apply_linears(x, (self.up,))
            return self.down(self.activation(up))
        gate, up = self.apply_linears(x, (self.gate, self.up))
        return self.down(self.activation(gate) * up)
