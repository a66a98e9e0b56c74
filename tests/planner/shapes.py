"""Published model shapes as plan models: those that ship in conf/model, and `model` for others."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import yaml

from orchestrator.config.groups import shipped
from orchestrator.config.schema import ModelSpec
from orchestrator.cost.model.layers import resolve
from orchestrator.plan.document import Model

GPT = dict(
    norm="layer",
    position="learned",
    mlp="plain",
    activation="gelu",
    bias=True,
    tied_embeddings=True,
)
LLAMA = dict(
    norm="rms", position="rope", mlp="gated", activation="silu", bias=False, tied_embeddings=False
)


def model(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    **fields: Any,
) -> Model:
    values = dict(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
    )
    values |= dict(
        ffn_hidden=ffn, vocab=vocab, max_seq_len=8192, norm_eps=1e-5, rope_theta=5e5, causal=True
    )
    style = LLAMA if fields.pop("style", "llama") == "llama" else GPT
    return Model(**(values | {"parameters": 0, "source": "test"} | style | fields))


def published(name: str) -> Model:
    """The shape of a file in conf/model, read without Hydra."""
    values = yaml.safe_load((shipped() / "model" / f"{name}.yaml").read_text())
    return resolve(msgspec.convert(values, ModelSpec))


gpt2, gpt3_175b, bert_large = (
    partial(published, name) for name in ("gpt2", "gpt3_175b", "bert_large")
)
llama3_8b, llama3_70b, llama3_405b = (
    partial(published, f"llama3_{size}") for size in ("8b", "70b", "405b")
)
mixtral_8x7b, deepseek_v3 = (partial(published, name) for name in ("mixtral_8x7b", "deepseek_v3"))


def tiny() -> Model:
    return model("tiny", 4, 64, 4, 2, 160, 259, max_seq_len=128)
