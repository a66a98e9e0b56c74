"""Published model shapes, as plan models. The sources are the models' own configuration files and papers."""

from __future__ import annotations

from typing import Any

from orchestrator.plan.document import Mla, Model, Moe

GPT = dict(norm="layer", position="learned", mlp="plain", activation="gelu", bias=True, tied_embeddings=True)
LLAMA = dict(norm="rms", position="rope", mlp="gated", activation="silu", bias=False, tied_embeddings=False)


def model(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> Model:
    style = LLAMA if more.pop("style", "llama") == "llama" else GPT
    values = dict(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_hidden=ffn,
        vocab=vocab,
        max_seq_len=8192,
        norm_eps=1e-5,
        rope_theta=5e5,
        causal=True,
        parameters=0,
        source="test",
    )
    return Model(**{**values, **style, **more})


def gpt2() -> Model:
    return model("gpt2", 12, 768, 12, 12, 3072, 50257, style="gpt", max_seq_len=1024)


def bert_large() -> Model:
    extra = {"token_types": 2 * 1024, "pooler": 1024 * 1024 + 1024}
    more = dict(style="gpt", max_seq_len=512, causal=False, extra_params=extra)
    return model("bert_large", 24, 1024, 16, 16, 4096, 30522, **more)


def gpt3_175b() -> Model:
    return model("gpt3_175b", 96, 12288, 96, 96, 49152, 51200, style="gpt", max_seq_len=2048)


def llama3_8b() -> Model:
    return model("llama3_8b", 32, 4096, 32, 8, 14336, 128256)


def llama3_70b() -> Model:
    return model("llama3_70b", 80, 8192, 64, 8, 28672, 128256)


def llama3_405b() -> Model:
    return model("llama3_405b", 126, 16384, 128, 8, 53248, 128256)


def mixtral_8x7b() -> Model:
    moe = Moe(experts=8, top_k=2, ffn_hidden=14336)
    return model("mixtral_8x7b", 32, 4096, 32, 8, 14336, 32000, moe=moe)


def deepseek_v3() -> Model:
    moe = Moe(experts=256, top_k=8, ffn_hidden=2048, shared_ffn_hidden=2048, first_dense_layers=3)
    mla = Mla(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    return model("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, moe=moe, mla=mla, head_dim=192)


def tiny() -> Model:
    return model("tiny", 4, 64, 4, 2, 160, 259, max_seq_len=128)
