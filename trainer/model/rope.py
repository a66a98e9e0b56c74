"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging
Face weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from orchestrator.plan.document import Model, Yarn

Rope = tuple[Tensor, Tensor]  # cos, sin: [b, s, 1, head_dim / 2]


def rope_tables(positions: Tensor, model: Model, dtype: torch.dtype) -> Rope:
    """Returns cosines and sines of the angles at int64 positions [b, s], in at least fp32: at
    position 8191 a bf16 angle is off by whole turns."""
    dtype = torch.promote_types(dtype, torch.float32)
    head_dim = model.mla.qk_rope_head_dim if model.mla else model.head_dim
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    speeds = model.rope_theta**-steps
    if model.yarn:
        stretch = _stretch(model.yarn, head_dim, model.rope_theta, positions.device)
        speeds = speeds * stretch.to(dtype)
    angles = positions.to(dtype)[:, :, None, None] * speeds
    return angles.cos(), angles.sin()


def _stretch(yarn: Yarn, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Returns the factors by which YaRN multiplies the rotary frequencies, float64 [head_dim / 2]:
    from 1 (fast) to 1 / factor (slow). They are made on the device, since the host would wait for a
    copy."""

    def dimension(turns: float) -> float:
        """Returns the index of the dimension that makes this many turns over the original
        length."""
        wavelength = yarn.original_seq_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first = max(0, math.floor(dimension(yarn.beta_fast)))
    last = min(head_dim - 1, math.ceil(dimension(yarn.beta_slow)))
    dimensions = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    slow = (dimensions - first) / max(last - first, 0.001)
    return 1.0 + slow.clamp(0.0, 1.0) * (1.0 / yarn.factor - 1.0)


def attention_scale(model: Model) -> float:
    """Returns the factor by which YaRN multiplies attention scores (arXiv 2309.00071, section 3.4;
    DeepSeek-V3's released weights)."""
    yarn = model.yarn
    if not yarn or yarn.factor <= 1:
        return 1.0
    return (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0) ** 2


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotates x [b, s, heads, head_dim]: dimension i turns together with i + head_dim / 2."""
    cos, sin = rope
    if torch.compiler.is_compiling():  # one kernel in each direction
        low, high = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """The rotation in three kernels that move five times x; backward turns by the opposite
    angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Each operation computes in the tables' dtype and rounds once to that of x.
    torch.mul(
        x.unflatten(-1, (2, -1)),
        cos.unsqueeze(-2),
        out=out.unflatten(-1, (2, -1)),
    )
    low, high = x.chunk(2, dim=-1)
    out_low, out_high = out.chunk(2, dim=-1)
    out_low.addcmul_(high, sin, value=-sign)
    out_high.addcmul_(low, sin, value=sign)
    return out
