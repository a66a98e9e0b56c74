"""Attention of a block of queries to a block of keys; returns output and log-sum-exp, from which blocks are joined.

Shapes: q [b, h, s_q, d]; k, v [b, h_kv, s_k, d] with h_kv dividing h; out like q; lse [b, h, s_q] (fp32, or fp64).
Joining follows FlashAttention (arXiv 2205.14135, section 3.1) and Ring Attention (arXiv 2310.01889): given the joined
output and log-sum-exp, the gradient of each block can be computed alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer import compat
from trainer.model.dropout import AttentionDropout


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse). `mask` [b, s_q, s_k] is True where a query may see a key, on top of `causal` (top-left aligned).
    `factors` [b, h, s_q, s_k] multiply the probabilities, which are not normalised again: dropout."""
    k, v = _expand(k, q), _expand(v, q)
    if mask is None and factors is None and compat.has_flash(q):
        return compat.flash_forward(q, k, v, causal, scale)
    scores = _scores(q, k, scale, causal, mask)
    lse = scores.logsumexp(dim=-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    weights = weights if factors is None else weights * factors
    return (weights.to(v.dtype) @ v), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this block, given the gradient, output and log-sum-exp of the *joined* attention."""
    kv_heads = k.shape[1]
    k, v = _expand(k, q), _expand(v, q)
    if mask is None and factors is None and compat.has_flash(q):
        dq, dk, dv = compat.flash_backward(grad, q, k, v, out, lse, causal, scale)
    else:
        weights = torch.exp(_scores(q, k, scale, causal, mask) - _finite(lse)[..., None])
        dv = (weights if factors is None else weights * factors).to(grad.dtype).transpose(-1, -2) @ grad
        delta = (grad * out).sum(dim=-1, keepdim=True, dtype=weights.dtype)
        dweights = (grad @ v.transpose(-1, -2)).to(weights.dtype)
        dweights = dweights if factors is None else dweights * factors
        dscores = (weights * (dweights - delta) * scale).to(q.dtype)
        dq, dk = dscores @ k, dscores.transpose(-1, -2) @ q
    return dq, _reduce(dk, kv_heads), _reduce(dv, kv_heads)


def join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of both. A side that saw no key has lse = -inf and weighs nothing.

    With the weights e^lse and e^more_lse the mean is out + sigmoid(more_lse - lse) (more - out): one pass over both.
    """
    weight = torch.sigmoid(more_lse - lse).nan_to_num(0.0)  # nan: neither saw a key, and both are zero
    return torch.lerp(out, more.to(out.dtype), weight[..., None].to(out.dtype)), torch.logaddexp(lse, more_lse)


def labels(documents: Tensor | None, serial: Tensor | None, drop: AttentionDropout | None) -> Tensor | None:
    """Labels of tokens that attention needs, as one message: document and, for dropout, serial number; int64
    [1 or 2, b, s], or None if it needs none."""
    if drop is None:
        return None if documents is None else documents[None]
    assert serial is not None
    return torch.stack([torch.zeros_like(serial) if documents is None else documents, serial])


def between(
    queries: Tensor | None, keys: Tensor | None, q: Tensor, drop: AttentionDropout | None
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, factors) of a block of `q` from both sides' labels: a token never attends to another packed document."""
    if queries is None or keys is None:
        return None, None
    mask = queries[0][:, :, None] == keys[0][:, None, :]
    if drop is None:
        return mask, None
    return mask, drop.kept(queries[1], keys[1], q.shape[1]).to(accumulation_dtype(q.dtype)) * drop.scale


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Blocks are joined in at least fp32, whatever they were computed in."""
    return torch.promote_types(dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(accumulation_dtype(q.dtype)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """exp(-inf - (-inf)) is nan; a row that saw nothing must give exp(-inf - 0) = 0."""
    return torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)


def _expand(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat key/value heads for their query heads (grouped-query attention)."""
    return kv if kv.shape[1] == q.shape[1] else kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _reduce(grad: Tensor, kv_heads: int) -> Tensor:
    """The transpose of `_expand`."""
    return grad if grad.shape[1] == kv_heads else grad.unflatten(1, (kv_heads, -1)).sum(dim=2)
