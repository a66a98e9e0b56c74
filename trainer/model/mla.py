"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv
2412.19437, 2.1.1).

Queries come from one low-rank latent, keys and values from another. Positions have dimensions of
their own: rotary dimensions of each query head, and one rotary key that all heads share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Mla, Model

from .attention import SDPA, Core
from .documents import Documents
from .dropout import AttentionDropout
from .linear import Linear
from .norm import RMSNorm
from .rope import Rope, attention_scale, rotate


class LatentAttention(nn.Module):
    """[b, s, hidden] -> [b, s, hidden]. Head counts follow from the weights' shapes, as in
    `Attention`."""

    #: Products with latents, `wq` and `wkv`: after those that make latents, before the last.
    MADE_OF_LATENTS = 2

    def __init__(self, model: Model, mla: Mla):
        super().__init__()
        self.mla = mla
        self.out_bias = None
        query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if mla.q_lora_rank:
            self.q_down = Linear(model.hidden, mla.q_lora_rank)
            self.q_norm = RMSNorm(mla.q_lora_rank, model.norm_eps)
        self.wq = Linear(mla.q_lora_rank or model.hidden, model.heads * query)
        self.kv_down = Linear(model.hidden, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, model.norm_eps)
        self.wkv = Linear(mla.kv_lora_rank, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.wo = Linear(model.heads * mla.v_head_dim, model.hidden)
        self.drop = AttentionDropout(model.dropout, model.heads) if model.dropout else None
        self.core: Core = SDPA(model.causal, self.drop)
        #: Replaceable: tensor parallelism communicates where latents meet the heads of a rank.
        self.latents_in: nn.Module = nn.Identity()
        self.scale = attention_scale(model)

    def forward(
        self,
        x: Tensor,
        token_index: Tensor | None,
        documents: Documents | None,
        rope: Rope | None,
    ) -> Tensor:
        assert rope is not None, "latent attention has rotary positions"
        latent_q, latent_kv, rotary_k = self._latents(x)
        q = self._queries(latent_q, rope)
        k, v = self._keys_and_values(latent_kv, rotary_k, rope)
        # Fused kernels need values as wide as keys.
        padded_v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        attended = self.core(q, k, padded_v, token_index, documents)
        return self.wo(attended[..., : v.shape[-1]].flatten(-2))

    def _latents(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the latent of queries, that of keys and values, and the rotary key that all heads
        share."""
        mla = self.mla
        latent_q = self.q_norm(self.q_down(x)) if mla.q_lora_rank else x
        widths = (mla.kv_lora_rank, mla.qk_rope_head_dim)
        latent_kv, rotary_k = self.kv_down(x).split(widths, dim=-1)
        latents = latent_q, self.kv_norm(latent_kv), rotary_k
        joined = self.latents_in(torch.cat(latents, dim=-1))
        return joined.split([latent.shape[-1] for latent in latents], dim=-1)

    def _queries(self, latent: Tensor, rope: Rope) -> Tensor:
        """[b, s, latent] -> [b, s, heads, d]"""
        widths = (self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim)
        q = self.wq(latent).unflatten(-1, (-1, sum(widths)))
        plain_q, rotary_q = q.split(widths, dim=-1)
        return torch.cat((plain_q, rotate(rotary_q, rope)), dim=-1) * self.scale

    def _keys_and_values(
        self,
        latent: Tensor,
        rotary_k: Tensor,
        rope: Rope,
    ) -> tuple[Tensor, Tensor]:
        """[b, s, latent] and the shared rotary key [b, s, d_rope] -> [b, s, heads, d] and
        [b, s, heads, d_v]"""
        widths = (self.mla.qk_nope_head_dim, self.mla.v_head_dim)
        kv = self.wkv(latent).unflatten(-1, (-1, sum(widths)))
        plain_k, v = kv.split(widths, dim=-1)
        shared_k = rotate(rotary_k[:, :, None], rope).expand(-1, -1, kv.shape[2], -1)
        return torch.cat((plain_k, shared_k), dim=-1), v
