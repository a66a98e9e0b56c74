"""The two modules that hold matrices. Each calls a replaceable `op`, so that techniques (vocabulary shards, split
weight gradients) are applied from outside and the model does not know them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """[..., in] -> [..., out]: x @ weight.T (+ bias), weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.op: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight, self.bias)


def apply_linears(x: Tensor, linears: Sequence[Linear]) -> Sequence[Tensor]:
    """Outputs of linears that share an input. Replaceable too: tensor parallelism runs them as one operation."""
    return [linear(x) for linear in linears]


class Embedding(nn.Module):
    """int64 [...] -> [..., hidden]: rows of weight [rows, hidden]."""

    def __init__(self, rows: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.op: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, index: Tensor) -> Tensor:
        return self.op(index, self.weight)
