"""Maps our names of parameters (docs/checkpoints.md) to those of the networks in `network`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_HEADS = {f"attn.w{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"}
_HEADS |= {f"attn.{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
_LATENT = {"attn.q_down": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm"}
_LATENT |= {
    "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm",
}
_LATENT |= {"attn.wkv": "self_attn.kv_b_proj", "attn.wo": "self_attn.o_proj"}
_MLP = {
    f"{inner}{matrix}": f"{inner}{matrix}_proj"
    for inner in ("mlp.", "mlp.shared.")
    for matrix in ("gate", "up", "down")
}
_OUTS = {"attn.out_bias": "self_attn.o_proj.bias", "mlp.out_bias": "mlp.down_proj.bias"}
_AHEAD = ("norm_token", "norm_hidden", "norm_out", "project")


def theirs(model: dict[str, Any], ours: Tensors) -> Tensors:
    """Returns every parameter of the network from ours; several of our tensors may form one of
    theirs."""
    gpt2 = model["position"] == "learned"
    out = dict(_gpt2(ours) if gpt2 else _llama(ours))
    out["body.lm_head.weight"] = ours.get("head.weight", ours["embed.weight"])
    of_layers: dict[int, Tensors] = {}
    for name, tensor in ours.items():
        if name.startswith("layers."):
            _, layer, name_in_layer = name.split(".", 2)
            of_layers.setdefault(int(layer), {})[name_in_layer] = tensor
    for number, layer_tensors in of_layers.items():
        ahead = number - model["layers"]
        ahead_tensors = {
            name: layer_tensors.pop(name)
            for name in list(layer_tensors)
            if name.split(".")[0] in _AHEAD
        }
        out |= {f"ahead.{ahead}.{name}": tensor for name, tensor in ahead_tensors.items()}
        layers = "transformer.h" if gpt2 else "model.layers"
        stem = f"ahead.{ahead}.block" if ahead >= 0 else f"body.{layers}.{number}"
        renamed = _gpt2_layer(layer_tensors) if gpt2 else _llama_layer(layer_tensors, model)
        out |= {f"{stem}.{name}": tensor for name, tensor in renamed.items()}
    return out


def _llama(ours: Tensors) -> Tensors:
    names = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    return {f"body.model.{their_name}": ours[our_name] for our_name, their_name in names.items()}


def _gpt2(ours: Tensors) -> Tensors:
    names = {"embed.weight": "wte.weight", "embed_positions.weight": "wpe.weight"}
    names |= {"norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}
    return {
        f"body.transformer.{their_name}": ours[our_name] for our_name, their_name in names.items()
    }


def _llama_layer(layer_tensors: Tensors, model: dict[str, Any]) -> Tensors:
    names = _NORMS | _MLP | (_LATENT if model.get("mla") else _HEADS)
    out = Tensors()
    if model.get("mla"):
        names["attn.wq"] = (
            "self_attn.q_b_proj" if model["mla"]["q_lora_rank"] else "self_attn.q_proj"
        )
    for name, tensor in layer_tensors.items():
        body, _, kind = name.rpartition(".")
        if name in _OUTS:
            out[_OUTS[name]] = tensor
        elif name.startswith("mlp.router."):
            out[name] = tensor
        elif not name.startswith("mlp.experts."):
            out[f"{names[body]}.{kind}"] = tensor
    if "mlp.experts.up.weight" in layer_tensors:
        gate_up = [layer_tensors[f"mlp.experts.{matrix}.weight"] for matrix in ("gate", "up")]
        out["mlp.experts.gate_up_proj"] = torch.cat(gate_up, 1)
        out["mlp.experts.down_proj"] = layer_tensors["mlp.experts.down.weight"]
    return out


def _gpt2_layer(layer_tensors: Tensors) -> Tensors:
    out = Tensors()
    for number in "12":
        for kind in ("weight", "bias"):
            out[f"ln_{number}.{kind}"] = layer_tensors[f"norm{number}.{kind}"]
    # Queries, keys and values are one matrix there, and matrices are [in, out].
    weights = [layer_tensors[f"attn.w{letter}.weight"].T for letter in "qkv"]
    out["attn.c_attn.weight"] = torch.cat(weights, dim=1)
    biases = [layer_tensors[f"attn.w{letter}.bias"] for letter in "qkv"]
    out["attn.c_attn.bias"] = torch.cat(biases)
    out |= {
        "attn.c_proj.weight": layer_tensors["attn.wo.weight"].T,
        "attn.c_proj.bias": layer_tensors["attn.out_bias"],
    }
    out |= {
        "mlp.c_fc.weight": layer_tensors["mlp.up.weight"].T,
        "mlp.c_fc.bias": layer_tensors["mlp.up.bias"],
    }
    return out | {
        "mlp.c_proj.weight": layer_tensors["mlp.down.weight"].T,
        "mlp.c_proj.bias": layer_tensors["mlp.out_bias"],
    }
