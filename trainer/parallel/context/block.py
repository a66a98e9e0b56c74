"""Attention of a block of queries to a block of keys, with the log-sum-exp from which blocks are
joined.

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
    """The visibility of a block's keys to its queries, in addition to causality (top-left
    aligned)."""

    mask: Tensor | None = None  # bool [b, s_q, s_k], True where a query may see a key
    #: [b, h, s_q, s_k], dropout's factors of the probabilities, which are not normalised
    #: afterwards.
    factors: Tensor | None = None
    #: Replaces a mask: runs of tokens of one document, the samples end to end.
    segments: Segments | None = None

    @property
    def nothing(self) -> bool:
        """Whether no query sees a key, as far as segments tell."""
        return self.segments is not None and not self.segments.meet


#: Only causality limits what queries see.
UNLIMITED = Sight()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    sight: Sight = UNLIMITED,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of this block."""
    mask, factors, segments = sight
    if segments is not None:
        flat_out, flat_lse = compat.segments_forward(
            _end_to_end(q),
            _end_to_end(k),
            _end_to_end(v),
            segments,
            causal,
            scale=scale,
        )
        batch = q.shape[0]
        out = flat_out.unflatten(0, (batch, -1)).transpose(1, 2)
        return out, flat_lse.unflatten(1, (batch, -1)).transpose(0, 1)
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
    sight: Sight = UNLIMITED,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv) of this block, given the gradient, output and log-sum-exp of the
    *joined* attention."""
    mask, factors, segments = sight
    if segments is not None:
        return _segments_backward(
            grad,
            q,
            k,
            v,
            out,
            lse=lse,
            segments=segments,
            causal=causal,
            scale=scale,
        )
    if mask is None and factors is None and compat.has_flash(q):
        return compat.flash_backward(
            grad,
            q,
            k,
            v,
            out,
            lse=lse,
            causal=causal,
            scale=scale,
        )
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


def _segments_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    lse: Tensor,
    segments: Segments,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = compat.segments_backward(
        _end_to_end(grad),
        _end_to_end(q),
        _end_to_end(k),
        _end_to_end(v),
        _end_to_end(out),
        lse=lse.transpose(0, 1).flatten(1).contiguous(),
        segments=segments,
        causal=causal,
        scale=scale,
    )
    batch = q.shape[0]
    dq, dk, dv = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (dq, dk, dv))
    return dq, dk, dv


def join(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor,
    other_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the attention over the keys of both sides. A side that saw no key has lse = -inf and
    the weight zero.

    With the weights e^lse and e^other_lse the mean is out + sigmoid(other_lse - lse) (other_out -
    out): one pass over both.
    """
    # nan: neither side saw a key, and both outputs are zero.
    weight = torch.sigmoid(other_lse - lse).nan_to_num(0.0)
    joined = torch.lerp(
        out,
        other_out.to(out.dtype),
        weight[..., None].to(out.dtype),
    )
    return joined, torch.logaddexp(lse, other_lse)


def labels(
    documents: Documents | None,
    token_index: Tensor | None,
    drop: AttentionDropout | None,
    q: Tensor,
) -> Tensor | None:
    """Returns the labels of tokens that attention of `q` needs from other ranks, as one message:
    the document and, for dropout, the token's number; int64 [1 or 2, b, s], or None if it does not
    need any."""
    if drop is None:
        return None if documents is None or compat.has_flash(q) else documents.numbers[None]
    assert token_index is not None
    numbers = torch.zeros_like(token_index) if documents is None else documents.numbers
    return torch.stack([numbers, token_index])


def between(
    queries: Tensor | None,
    keys: Tensor | None,
    q: Tensor,
    drop: AttentionDropout | None,
) -> Sight:
    """Returns the visibility of a block of `q` from both sides' labels: a token never attends to
    another packed document."""
    if queries is None or keys is None:
        return Sight()
    mask = queries[0][:, :, None] == keys[0][:, None, :]
    if drop is None:
        return Sight(mask)
    kept_mask = drop.kept(queries[1], keys[1], q.shape[1])
    return Sight(mask, kept_mask.to(accumulation_dtype(q.dtype)) * drop.scale)


def inside(documents: Documents, queries: Ranges, keys: Ranges) -> Sight:
    """Returns the visibility from the positions of both sides' tokens, for kernels that know
    documents."""
    return Sight(segments=documents.segments(queries, keys))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which blocks are joined: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    scores = grouped_product(q, k.transpose(-1, -2)).to(dtype) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """Replaces infinite log-sum-exps by zero: exp(-inf - (-inf)) is nan, but a row that saw nothing
    must give exp(-inf - 0) = 0."""
    return torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)


def _end_to_end(x: Tensor) -> Tensor:
    """[b, h, s, d] -> [b * s, h, d]"""
    return x.transpose(1, 2).flatten(0, 1)
