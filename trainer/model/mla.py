"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv
2412.19437, 2.1.1).

Queries come from one low-rank latent, keys and values from another; positions are in a part of
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

    MADE_OF_LATENTS = (
        2  # the products `wq` and `wkv`, behind those that make latents and before the last
    )

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
        self.latents_in: nn.Module = (
            nn.Identity()
        )  # replaced: here latents meet the heads of a rank
        self.scale = attention_scale(model)

    def forward(
        self, x: Tensor, token_index: Tensor | None, documents: Documents | None, rope: Rope | None
    ) -> Tensor:
        mla = self.mla
        assert rope is not None, "latent attention has rotary positions"
        latent_q = self.q_norm(self.q_down(x)) if mla.q_lora_rank else x
        latent, shared = self.kv_down(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        latents = latent_q, self.kv_norm(latent), shared
        latent_q, latent, shared = self.latents_in(torch.cat(latents, dim=-1)).split(
            [y.shape[-1] for y in latents], dim=-1
        )
        q = self.wq(latent_q).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
        plain_q, rotary_q = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        kv = self.wkv(latent).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        plain_k, v = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        rotary_k = rotate(shared[:, :, None], rope).expand(-1, -1, kv.shape[2], -1)
        q = torch.cat((plain_q, rotate(rotary_q, rope)), dim=-1) * self.scale
        k = torch.cat((plain_k, rotary_k), dim=-1)
        # Fused kernels want values as wide as keys.
        padded_v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return self.wo(
            self.core(q, k, padded_v, token_index, documents)[..., : v.shape[-1]].flatten(-2)
        )
