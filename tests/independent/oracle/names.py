"""Our names of parameters (docs/checkpoints.md) -> those of the networks that `network` builds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_HEADS = {f"attn.w{one}": f"self_attn.{one}_proj" for one in "qkvo"}
_HEADS |= {f"attn.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
_LATENT = {"attn.q_down": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm"}
_LATENT |= {
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
}
_LATENT |= {"attn.wkv": "self_attn.kv_b_proj", "attn.wo": "self_attn.o_proj"}
_MLP = {
    f"{inner}{one}": f"{inner}{one}_proj"
    for inner in ("mlp.", "mlp.shared.")
    for one in ("gate", "up", "down")
}
_OUTS = {"attn.out_bias": "self_attn.o_proj.bias", "mlp.out_bias": "mlp.down_proj.bias"}
_AHEAD = ("norm_token", "norm_hidden", "norm_out", "project")


def theirs(model: dict[str, Any], ours: Tensors) -> Tensors:
    """Every parameter of the network, from ours; what is one tensor there and several here is put
    together."""
    gpt2 = model["position"] == "learned"
    out = dict(_gpt2(ours) if gpt2 else _llama(ours))
    out["body.lm_head.weight"] = ours.get("head.weight", ours["embed.weight"])
    of_layers: dict[int, Tensors] = {}
    for name, tensor in ours.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            of_layers.setdefault(int(layer), {})[part] = tensor
    for number, parts in of_layers.items():
        ahead = number - model["layers"]
        own = {name: parts.pop(name) for name in list(parts) if name.split(".")[0] in _AHEAD}
        out |= {f"ahead.{ahead}.{name}": tensor for name, tensor in own.items()}
        stem = (
            f"ahead.{ahead}.block"
            if ahead >= 0
            else f"body.{'transformer.h' if gpt2 else 'model.layers'}.{number}"
        )
        of_layer = _gpt2_layer(parts) if gpt2 else _llama_layer(parts, model)
        out |= {f"{stem}.{name}": tensor for name, tensor in of_layer.items()}
    return out


def _llama(ours: Tensors) -> Tensors:
    names = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    return {f"body.model.{there}": ours[here] for here, there in names.items()}


def _gpt2(ours: Tensors) -> Tensors:
    names = {"embed.weight": "wte.weight", "embed_positions.weight": "wpe.weight"}
    names |= {"norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}
    return {f"body.transformer.{there}": ours[here] for here, there in names.items()}


def _llama_layer(parts: Tensors, model: dict[str, Any]) -> Tensors:
    names = _NORMS | _MLP | (_LATENT if model.get("mla") else _HEADS)
    out = Tensors()
    if model.get("mla"):
        names["attn.wq"] = (
            "self_attn.q_b_proj" if model["mla"]["q_lora_rank"] else "self_attn.q_proj"
        )
    for part, tensor in parts.items():
        body, _, last = part.rpartition(".")
        if part in _OUTS:
            out[_OUTS[part]] = tensor
        elif part.startswith("mlp.router."):
            out[part] = tensor
        elif not part.startswith("mlp.experts."):
            out[f"{names[body]}.{last}"] = tensor
    if "mlp.experts.up.weight" in parts:
        both = [parts[f"mlp.experts.{one}.weight"] for one in ("gate", "up")]
        out["mlp.experts.gate_up_proj"] = torch.cat(both, 1)
        out["mlp.experts.down_proj"] = parts["mlp.experts.down.weight"]
    return out


def _gpt2_layer(parts: Tensors) -> Tensors:
    out = Tensors()
    for one in "12":
        for last in ("weight", "bias"):
            out[f"ln_{one}.{last}"] = parts[f"norm{one}.{last}"]
    read = [f"attn.w{one}" for one in "qkv"]  # one matrix there, and [in, out]
    out["attn.c_attn.weight"] = torch.cat([parts[f"{one}.weight"].T for one in read], dim=1)
    out["attn.c_attn.bias"] = torch.cat([parts[f"{one}.bias"] for one in read])
    out |= {
        "attn.c_proj.weight": parts["attn.wo.weight"].T,
        "attn.c_proj.bias": parts["attn.out_bias"],
    }
    out |= {"mlp.c_fc.weight": parts["mlp.up.weight"].T, "mlp.c_fc.bias": parts["mlp.up.bias"]}
    return out | {
        "mlp.c_proj.weight": parts["mlp.down.weight"].T,
        "mlp.c_proj.bias": parts["mlp.out_bias"],
    }
