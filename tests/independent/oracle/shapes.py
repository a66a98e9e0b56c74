"""The parameters of a plan's model, and its state without gradient, by name and shape
(docs/checkpoints.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: (name, shape), in the order of the model.
Named = Iterator[tuple[str, tuple[int, ...]]]


def shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a plan's model by name."""
    return dict(_every(model))


def state_shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the state without gradient: a bias for each expert, if routers have
    biases, and the load of the step before, if the whole batch is balanced."""
    moe = model.get("moe") or {}
    kinds = ["bias"] * ("bias_update" in moe)
    kinds += ["load"] * (moe.get("balance_over") == "batch" and bool(moe.get("balance_loss")))
    layers = range(model["layers"] + (model.get("mtp") or {}).get("depth", 0)) if kinds else ()
    sparse = [layer for layer in layers if layer >= moe.get("first_dense_layers", 0)]
    return {
        f"layers.{layer}.mlp.router.{kind}": (moe["experts"],) for layer in sparse for kind in kinds
    }


def _every(model: dict[str, Any]) -> Named:
    hidden = model["hidden"]
    depth = (model.get("mtp") or {}).get("depth", 0)
    yield "embed.weight", (model["vocab"], hidden)
    if model["position"] == "learned":
        yield "embed_positions.weight", (model["max_seq_len"], hidden)
    for number in range(model["layers"] + depth):
        layer = f"layers.{number}"
        yield from _norm(f"{layer}.norm1", model)
        attention = _latent if model.get("mla") else _heads
        yield from attention(f"{layer}.attn", model)
        yield from _norm(f"{layer}.norm2", model)
        moe = model.get("moe")
        if not moe or number < moe.get("first_dense_layers", 0):
            yield from _mlp(f"{layer}.mlp", model, model["ffn_hidden"])
        else:
            yield from _experts(f"{layer}.mlp", model)
        if number >= model["layers"]:
            for name in ("norm_token", "norm_hidden", "norm_out"):
                yield from _norm(f"{layer}.{name}", model)
            yield f"{layer}.project.weight", (hidden, 2 * hidden)
    yield from _norm("norm", model)
    if not model["tied_embeddings"]:
        yield "head.weight", (model["vocab"], hidden)


def _linear(name: str, outputs: int, inputs: int, bias: str) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield bias, (outputs,)


def _norm(name: str, model: dict[str, Any]) -> Named:
    yield f"{name}.weight", (model["hidden"],)
    if model["norm"] == "layer":
        yield f"{name}.bias", (model["hidden"],)


def _heads(name: str, model: dict[str, Any]) -> Named:
    hidden = model["hidden"]
    bias = model["bias"]
    queries = model["heads"] * model["head_dim"]
    keys = model["kv_heads"] * model["head_dim"]
    for matrix, outputs in (("wq", queries), ("wk", keys), ("wv", keys)):
        yield from _linear(
            f"{name}.{matrix}", outputs, hidden, f"{name}.{matrix}.bias" if bias else ""
        )
    yield from _linear(f"{name}.wo", hidden, queries, f"{name}.out_bias" if bias else "")
    if model.get("qk_norm"):
        yield from ((f"{name}.{matrix}_norm.weight", (model["head_dim"],)) for matrix in "qk")


def _latent(name: str, model: dict[str, Any]) -> Named:
    mla = model["mla"]
    hidden = model["hidden"]
    heads = model["heads"]
    plain = mla["qk_nope_head_dim"]
    turned = mla["qk_rope_head_dim"]
    rank = mla["q_lora_rank"]
    if rank:
        yield f"{name}.q_down.weight", (rank, hidden)
        yield f"{name}.q_norm.weight", (rank,)
    yield f"{name}.wq.weight", (heads * (plain + turned), rank or hidden)
    yield f"{name}.kv_down.weight", (mla["kv_lora_rank"] + turned, hidden)
    yield f"{name}.kv_norm.weight", (mla["kv_lora_rank"],)
    yield f"{name}.wkv.weight", (heads * (plain + mla["v_head_dim"]), mla["kv_lora_rank"])
    yield f"{name}.wo.weight", (hidden, heads * mla["v_head_dim"])


def _mlp(name: str, model: dict[str, Any], width: int) -> Named:
    bias = model["bias"]
    for matrix in ("gate", "up") if model["mlp"] == "gated" else ("up",):
        yield from _linear(
            f"{name}.{matrix}", width, model["hidden"], f"{name}.{matrix}.bias" if bias else ""
        )
    yield from _linear(f"{name}.down", model["hidden"], width, f"{name}.out_bias" if bias else "")


def _experts(name: str, model: dict[str, Any]) -> Named:
    moe = model["moe"]
    hidden = model["hidden"]
    yield f"{name}.router.weight", (moe["experts"], hidden)
    for matrix in ("gate", "up") if model["mlp"] == "gated" else ("up",):
        yield f"{name}.experts.{matrix}.weight", (moe["experts"], moe["ffn_hidden"], hidden)
    yield f"{name}.experts.down.weight", (moe["experts"], hidden, moe["ffn_hidden"])
    if width := moe.get("shared_ffn_hidden", 0):
        yield from _mlp(f"{name}.shared", model, width)
