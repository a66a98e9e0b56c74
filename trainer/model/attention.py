"""Self-attention with grouped key/value heads (Ainslie et al. 2023, arXiv 2305.13245) through
torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Model
from trainer.compat import has_flash, segment_attention

from .documents import Documents
from .dropout import AttentionDropout
from .linear import Linear, apply_linears
from .norm import RMSNorm
from .rope import Rope, rotate

#: (q [b, s, heads, d], k and v [b, s, kv_heads, d], token_index [b, s], packed documents or None)
#: -> [b, s, heads, d]; `token_index`, the tokens' numbers in the run, may be None without dropout
Core = Callable[[Tensor, Tensor, Tensor, Tensor | None, Documents | None], Tensor]


class Attention(nn.Module):
    """[b, s, hidden] -> [b, s, hidden] without the output bias, which the block adds after
    `attn_out`.

    Head counts follow from the weights' shapes, so a rank with a slice of the heads runs the same
    code. Context parallelism replaces `core`.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.head_dim = model.head_dim
        queries = model.heads * model.head_dim
        keys = model.kv_heads * model.head_dim
        self.wq = Linear(model.hidden, queries, model.bias)
        self.wk = Linear(model.hidden, keys, model.bias)
        self.wv = Linear(model.hidden, keys, model.bias)
        self.wo = Linear(queries, model.hidden)
        if model.qk_norm:
            self.q_norm = RMSNorm(model.head_dim, model.norm_eps)
            self.k_norm = RMSNorm(model.head_dim, model.norm_eps)
        self.qk_norm = bool(model.qk_norm)
        self.out_bias = nn.Parameter(torch.empty(model.hidden)) if model.bias else None
        self.apply_linears = apply_linears
        self.drop = AttentionDropout(model.dropout, model.heads) if model.dropout else None
        self.core: Core = SDPA(model.causal, self.drop)

    def forward(
        self, x: Tensor, token_index: Tensor | None, documents: Documents | None, rope: Rope | None
    ) -> Tensor:
        q, k, v = self.apply_linears(x, (self.wq, self.wk, self.wv))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if rope is not None:
            q = rotate(q, rope)
            k = rotate(k, rope)
        return self.wo(self.core(q, k, v, token_index, documents).flatten(-2))


class SDPA:
    """Attention over the whole sequence on one rank. Tokens of different packed documents do not
    see each other."""

    def __init__(self, causal: bool, drop: AttentionDropout | None = None):
        self.causal = causal
        self.drop = drop

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_index: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        if documents is not None and self.knows_documents(q):
            flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
            scale = q.shape[-1] ** -0.5
            segments = documents.whole()
            out = segment_attention(flat_q, flat_k, flat_v, segments, self.causal, scale=scale)
            return out.view_as(q)
        mask = None if documents is None else self._mask(documents.numbers)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.drop is not None:
            assert token_index is not None
            return self._dropped(q, k, v, token_index, mask=mask, drop=self.drop).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)

    def knows_documents(self, q: Tensor) -> bool:
        """Whether a kernel keeps packed documents apart, so that no mask is needed."""
        return self.drop is None and has_flash(q)

    def _dropped(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_index: Tensor,
        *,
        mask: Tensor | None,
        drop: AttentionDropout,
    ) -> Tensor:
        """Computes attention with explicit probabilities, since the fused kernels draw masks of
        their own."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = grouped_product(q, k.transpose(-1, -2)).to(dtype)
        scores = scores * q.shape[-1] ** -0.5
        if self.causal and mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        mask_of_kept = drop.kept(token_index, token_index, q.shape[1])
        weights = scores.softmax(dim=-1).masked_fill(~mask_of_kept, 0.0)
        return grouped_product((weights * drop.scale).to(v.dtype), v)

    def _mask(self, documents: Tensor) -> Tensor:
        """Returns bool [b, 1, s, s], True where attention is allowed: within a document and, when
        causal, not to later tokens. It is used where no kernel knows documents: with dropout, and
        in fp32 on a GPU."""
        same_document = documents[:, None, :, None] == documents[:, None, None, :]
        return same_document.tril() if self.causal else same_document


def folded(x: Tensor, kv_heads: int) -> Tensor:
    """[b, heads, s, n] -> [b, kv_heads, heads / kv_heads * s, n]: joins the rows of the query heads
    that share a key head."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def grouped_product(rows: Tensor, shared: Tensor) -> Tensor:
    """[b, heads, s, n] @ [b, kv_heads, n, m] -> [b, heads, s, m], without repeating the factor that
    query heads share."""
    product = folded(rows, shared.shape[1]) @ shared
    return product.unflatten(2, (-1, rows.shape[2])).flatten(1, 2)
