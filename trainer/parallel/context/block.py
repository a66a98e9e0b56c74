"""Attention of a block of queries to a block of keys; returns output and log-sum-exp, from which
blocks are joined.

Shapes: q [b, h, s_q, d]; k, v [b, h_kv, s_k, d] with h_kv dividing h; out like q; lse [b, h, s_q]
(fp32, or fp64). Joining follows FlashAttention (arXiv 2205.14135, section 3.1) and Ring Attention
(arXiv 2310.01889): given the joined output and log-sum-exp, the gradient of each block can be
computed alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainer import compat
from trainer.compat import Segments
from trainer.model.attention import folded, grouped_product
from trainer.model.documents import Documents, Ranges
from trainer.model.dropout import AttentionDropout


class Sight(NamedTuple):
    """What a block's queries see of its keys, on top of causality (top-left aligned)."""

    mask: Tensor | None = None  # bool [b, s_q, s_k], True where a query may see a key
    factors: Tensor | None = (
        None  # [b, h, s_q, s_k], of the probabilities, which are not normalised again: dropout
    )
    segments: Segments | None = (
        None  # in place of a mask: runs of tokens of one document, the samples end to end
    )

    @property
    def nothing(self) -> bool:
        return self.segments is not None and not self.segments.meet


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
    factors: Tensor | None = None,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) under a `Sight`."""
    if segments is not None:
        flat = _end_to_end(q), _end_to_end(k), _end_to_end(v)
        out, lse = compat.segments_forward(*flat, segments, causal, scale)
        return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2), lse.unflatten(
            1, (q.shape[0], -1)
        ).transpose(0, 1)
    if mask is None and factors is None and compat.has_flash(q):
        return compat.flash_forward(q, k, v, causal, scale)
    scores = _scores(q, k, scale, causal, mask)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    weights = weights if factors is None else weights * factors
    return grouped_product(weights.to(v.dtype), v), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
    factors: Tensor | None = None,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this block, given the gradient, output and log-sum-exp of the *joined*
    attention."""
    if segments is not None:
        of_rows = (_end_to_end(grad), _end_to_end(q))
        of_keys = (_end_to_end(k), _end_to_end(v))
        flat_lse = lse.transpose(0, 1).flatten(1).contiguous()
        parts = compat.segments_backward(
            *of_rows, *of_keys, _end_to_end(out), flat_lse, segments, causal, scale
        )
        of_q, of_k, of_v = (part.unflatten(0, (q.shape[0], -1)).transpose(1, 2) for part in parts)
        return of_q, of_k, of_v
    if mask is None and factors is None and compat.has_flash(q):
        return compat.flash_backward(grad, q, k, v, out, lse, causal, scale)
    kv_heads = k.shape[1]
    weights = torch.exp(_scores(q, k, scale, causal, mask) - _finite(lse)[..., None])
    dropped = (weights if factors is None else weights * factors).to(grad.dtype)
    dv = folded(dropped, kv_heads).transpose(-1, -2) @ folded(grad, kv_heads)
    delta = (grad * out).sum(dim=-1, keepdim=True, dtype=weights.dtype)
    dweights = grouped_product(grad, v.transpose(-1, -2)).to(weights.dtype)
    dweights = dweights if factors is None else dweights * factors
    dscores = (weights * (dweights - delta) * scale).to(q.dtype)
    dk = folded(dscores, kv_heads).transpose(-1, -2) @ folded(q, kv_heads)
    return grouped_product(dscores, k), dk, dv


def join(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both. A side that saw no key has lse = -inf and weighs
    nothing.

    With the weights e^lse and e^more_lse the mean is out + sigmoid(more_lse - lse) (more - out):
    one pass over both.
    """
    weight = torch.sigmoid(other_lse - lse).nan_to_num(
        0.0
    )  # nan: neither saw a key, and both are zero
    return torch.lerp(
        out, other_out.to(out.dtype), weight[..., None].to(out.dtype)
    ), torch.logaddexp(lse, other_lse)


def labels(
    documents: Documents | None,
    token_index: Tensor | None,
    drop: AttentionDropout | None,
    q: Tensor,
) -> Tensor | None:
    """Labels of tokens that attention of `q` needs of other ranks, as one message: document and,
    for dropout, serial number; int64 [1 or 2, b, s], or None if it needs none."""
    if drop is None:
        return None if documents is None or compat.has_flash(q) else documents.numbers[None]
    assert token_index is not None
    return torch.stack(
        [torch.zeros_like(token_index) if documents is None else documents.numbers, token_index]
    )


def between(
    queries: Tensor | None, keys: Tensor | None, q: Tensor, drop: AttentionDropout | None
) -> Sight:
    """What a block of `q` sees, from both sides' labels: a token never attends to another packed
    document."""
    if queries is None or keys is None:
        return Sight()
    mask = queries[0][:, :, None] == keys[0][:, None, :]
    if drop is None:
        return Sight(mask)
    return Sight(
        mask,
        drop.kept(queries[1], keys[1], q.shape[1]).to(accumulation_dtype(q.dtype)) * drop.scale,
    )


def inside(documents: Documents, queries: Ranges, keys: Ranges) -> Sight:
    """The same where kernels know documents, from the positions of both sides' tokens."""
    return Sight(segments=documents.segments(queries, keys))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Blocks are joined in at least fp32, whatever they were computed in."""
    return torch.promote_types(dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    scores = grouped_product(q, k.transpose(-1, -2)).to(accumulation_dtype(q.dtype)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """exp(-inf - (-inf)) is nan; a row that saw nothing must give exp(-inf - 0) = 0."""
    return torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)


def _end_to_end(x: Tensor) -> Tensor:
    """[b, h, s, d] -> [b * s, h, d]"""
    return x.transpose(1, 2).flatten(0, 1)
