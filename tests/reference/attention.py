"""Naive twin of every attention: one query, one head, one sum at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, causal: bool = True
) -> Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d], documents [b, s] or None -> [b, s, heads,
    d]"""
    group = q.shape[2] // k.shape[2]
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for h in range(q.shape[2]):
                seen = [
                    j
                    for j in range(k.shape[1])
                    if (j <= i or not causal)
                    and (documents is None or documents[b, i] == documents[b, j])
                ]
                scores = (
                    torch.stack([(q[b, i, h] * k[b, j, h // group]).sum() for j in seen])
                    / q.shape[-1] ** 0.5
                )
                weights = torch.exp(scores) / torch.exp(scores).sum()
                rows.append(sum(weights[n] * v[b, j, h // group] for n, j in enumerate(seen)))
    return torch.stack(rows).view_as(q)
