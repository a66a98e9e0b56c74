"""One pre-norm decoder block and its MLP.

Attention and MLP are each a region between two modules that are identities here: `attn_in` and `attn_out`, `mlp_in` and
`mlp_out`. Tensor parallelism replaces them: the first make the input of column-parallel linears, the second sum the
partial results of row-parallel ones. Output biases are added after that, else tp ranks would add them tp times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Model

from .attention import Attention
from .dropout import Dropout
from .linear import Linear, apply_linears
from .norm import make_norm
from .rope import Rope

#: gelu in GPT-2's form, the tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


class MLP(nn.Module):
    """[b, s, hidden] -> [b, s, hidden] without the output bias.

    plain: down(act(up(x))); gated: down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202).
    """

    def __init__(self, model: Model):
        super().__init__()
        self.gate = Linear(model.hidden, model.ffn_hidden, model.bias) if model.mlp == "gated" else None
        self.up = Linear(model.hidden, model.ffn_hidden, model.bias)
        self.down = Linear(model.ffn_hidden, model.hidden)
        self.out_bias = nn.Parameter(torch.empty(model.hidden)) if model.bias else None
        self.activation = ACTIVATIONS[model.activation]
        self.apply_linears = apply_linears

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            (up,) = self.apply_linears(x, (self.up,))
            return self.down(self.activation(up))
        gate, up = self.apply_linears(x, (self.gate, self.up))
        return self.down(self.activation(gate) * up)


class Block(nn.Module):
    """[b, s, hidden] -> [b, s, hidden]; the input and output may be sequence shards, attention sees whole sequences."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm1, self.attn = make_norm(model), Attention(model)
        self.norm2, self.mlp = make_norm(model), MLP(model)
        self.attn_in, self.attn_out, self.mlp_in, self.mlp_out = identities(4)
        self.drop_attn, self.drop_mlp = Dropout(model.dropout), Dropout(model.dropout)

    def forward(
        self,
        x: Tensor,
        serial: Tensor | None = None,
        documents: Tensor | None = None,
        rope: Rope | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`serial` [b, s], `rows`: the numbers of the tokens that attention sees, and of those in `x`; for dropout."""
        attended = self.attn_out(self.attend(x, serial, documents, rope))
        x = x + self.drop_attn(_biased(attended, self.attn.out_bias), rows)
        return x + self.drop_mlp(_biased(self.mlp_out(self.mix(x)), self.mlp.out_bias), rows)

    # The two halves up to their partial sums are methods, so that recomputation can wrap each.

    def attend(self, x: Tensor, serial: Tensor | None, documents: Tensor | None, rope: Rope | None) -> Tensor:
        return self.attn(self.attn_in(self.norm1(x)), serial, documents, rope)

    def mix(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp_in(self.norm2(x)))


def identities(count: int) -> list[nn.Module]:
    """Modules that parallelism may replace."""
    return [nn.Identity() for _ in range(count)]


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
