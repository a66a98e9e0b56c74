"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split layout of Hugging Face weights."""

from __future__ import annotations

import torch
from torch import Tensor

Rope = tuple[Tensor, Tensor]  # cos, sin: [b, s, 1, head_dim / 2]


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """Angles of int64 positions [b, s]. Never below fp32: at position 8191 a bf16 angle is off by whole turns."""
    dtype = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype) / head_dim
    angles = positions.to(dtype)[:, :, None, None] * theta**-steps
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [b, s, heads, head_dim], dimension i turned together with i + head_dim / 2."""
    cos, sin = rope
    low, high = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
