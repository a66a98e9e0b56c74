"""The networks of `transformers` with a plan's weights: summed loss and gradients of a batch, in any precision.

Llama, Qwen3 (normalised heads) and GPT-2 are taken as they are, but for two modules of the first two: `transformers`
computes RMSNorm and the rotary angles in fp32 whatever the weights are, so in fp64 they would not be exact. Ours are
the formulas, in fp32 or wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data import IGNORED, Batch

Tensors = dict[str, Tensor]


class Unknown(ValueError):
    """The plan's model is none that `transformers` has here."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


class Angles(nn.Module):
    """cos and sin of position * base^(-2 i / d) (arXiv 2104.09864), for i and again for i + d / 2."""

    def __init__(self, base: float, size: int):
        super().__init__()
        self.speeds: Tensor
        self.speeds = torch.tensor([base ** (-2 * i / size) for i in range(size // 2)] * 2, dtype=torch.float64)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.speeds
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Network:
    """A decoder of `transformers` in one precision."""

    def __init__(self, model: dict[str, Any], dtype: torch.dtype):
        """`model`: of the plan. Raises Unknown."""
        import transformers  # seconds; only the judge needs it

        self.model, self.dtype = model, dtype
        self.gpt2 = (model["norm"], model["position"], model["mlp"]) == ("layer", "learned", "plain")
        if problem := self._unlike():
            raise Unknown(f"model {model['name']}: {problem}; the independent oracle has Llama, Qwen3 and GPT-2")
        kind = "GPT2" if self.gpt2 else "Qwen3" if model.get("qk_norm") else "Llama"
        config = getattr(transformers, f"{kind}Config")(**(self._gpt2_words() if self.gpt2 else self._llama_words()))
        self.module = getattr(transformers, "GPT2LMHeadModel" if self.gpt2 else f"{kind}ForCausalLM")(config).eval()
        if not self.gpt2:
            self._exact(self.module)
        self.module.to(dtype)

    def _unlike(self) -> str:
        """Why it is none of the three, or nothing."""
        model = self.model
        if any(model.get(part) for part in ("moe", "mla", "yarn", "mtp")) or not model["causal"]:
            return "experts, latent attention, stretched positions, further predictions or no causal mask"
        if model.get("dropout"):
            return "dropout, whose masks are the trainer's own"
        if self.gpt2:
            same = model["heads"] * model["head_dim"] == model["hidden"] and model["kv_heads"] == model["heads"]
            fits = same and model["bias"] and model["activation"] == "gelu"
            return "" if fits else "GPT-2 has biases, gelu, as many key-value as query heads, and hidden = heads x size"
        if (model["norm"], model["position"], model["mlp"], model["activation"]) != ("rms", "rope", "gated", "silu"):
            return "Llama has RMSNorm, rotary positions and a gated silu"
        return "Qwen3's MLP has no biases" if model.get("qk_norm") and model["bias"] else ""

    def _llama_words(self) -> dict[str, Any]:
        model, bias = self.model, {"attention_bias": self.model["bias"]}
        return {
            **{"vocab_size": model["vocab"], "hidden_size": model["hidden"], "intermediate_size": model["ffn_hidden"]},
            **{"num_hidden_layers": model["layers"], "num_attention_heads": model["heads"]},
            **{"num_key_value_heads": model["kv_heads"], "head_dim": model["head_dim"]},
            **{"rms_norm_eps": model["norm_eps"], "max_position_embeddings": model["max_seq_len"], "use_cache": False},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]}},
            **{"tie_word_embeddings": False, "attn_implementation": "sdpa"},
            **(bias if model.get("qk_norm") else bias | {"mlp_bias": model["bias"]}),
        }

    def _gpt2_words(self) -> dict[str, Any]:
        model = self.model
        return {
            **{"vocab_size": model["vocab"], "n_embd": model["hidden"], "n_inner": model["ffn_hidden"]},
            **{"n_layer": model["layers"], "n_head": model["heads"], "n_positions": model["max_seq_len"]},
            **{"layer_norm_epsilon": model["norm_eps"], "activation_function": "gelu_new", "use_cache": False},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            **{"tie_word_embeddings": False, "attn_implementation": "sdpa"},
        }

    def _exact(self, module: nn.Module) -> None:
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, RMSNorm(child.get_parameter("weight").detach(), self.model["norm_eps"]))
            elif type(child).__name__.endswith("RotaryEmbedding"):
                setattr(module, name, Angles(self.model["rope_theta"], self.model["head_dim"]))
            else:
                self._exact(child)

    def gradients(self, weights: Mapping[str, Tensor], batch: Batch, scale: float) -> tuple[Tensor, Tensors]:
        """(loss of every token [samples, sequence], 0 where it does not count; gradients of their sum times `scale`)
        by our names, in this precision; the loss in fp32 or wider."""
        leaves = {name: tensor.detach().to(self.dtype, copy=True).requires_grad_() for name, tensor in weights.items()}
        theirs = dict(self._gpt2_names(leaves) if self.gpt2 else self._llama_names(leaves))
        same = batch.documents[:, None, :, None] == batch.documents[:, None, None, :]
        words = {"input_ids": batch.tokens, "position_ids": batch.positions, "attention_mask": same.tril()}
        logits = torch.func.functional_call(self.module, theirs, kwargs=words).logits
        wide = logits.to(torch.promote_types(self.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
        (losses.sum() * scale).backward()
        none = {name: torch.zeros_like(leaf) for name, leaf in leaves.items() if leaf.grad is None}
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return losses.detach().view_as(batch.targets), grads | none

    def _llama_names(self, ours: Tensors) -> Tensors:
        names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        parts = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
        parts |= {f"attn.w{one}": f"self_attn.{one}_proj" for one in "qkvo"}
        parts |= {f"attn.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
        parts |= {f"mlp.{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
        outs = {"attn.out_bias": "self_attn.o_proj.bias", "mlp.out_bias": "mlp.down_proj.bias"}
        theirs = {"lm_head.weight": ours.get("head.weight", ours["embed.weight"])}
        for name, tensor in ours.items():
            if name in names:
                theirs[names[name]] = tensor
            elif name != "head.weight":
                _, layer, part = name.split(".", 2)
                body, _, last = part.rpartition(".")
                theirs[f"model.layers.{layer}." + (outs[part] if part in outs else f"{parts[body]}.{last}")] = tensor
        return theirs

    def _gpt2_names(self, ours: Tensors) -> Tensors:
        names = {"embed.weight": "wte.weight", "embed_positions.weight": "wpe.weight"}
        names |= {"norm.weight": "ln_f.weight", "norm.bias": "ln_f.bias"}
        theirs = {f"transformer.{there}": ours[here] for here, there in names.items()}
        theirs["lm_head.weight"] = ours.get("head.weight", ours["embed.weight"])
        for layer in range(self.model["layers"]):
            here, there = f"layers.{layer}", f"transformer.h.{layer}"
            for number in "12":
                for last in ("weight", "bias"):
                    theirs[f"{there}.ln_{number}.{last}"] = ours[f"{here}.norm{number}.{last}"]
            read = [f"{here}.attn.w{one}" for one in "qkv"]  # one matrix there, and [in, out]
            theirs[f"{there}.attn.c_attn.weight"] = torch.cat([ours[f"{one}.weight"].T for one in read], dim=1)
            theirs[f"{there}.attn.c_attn.bias"] = torch.cat([ours[f"{one}.bias"] for one in read])
            theirs[f"{there}.attn.c_proj.weight"] = ours[f"{here}.attn.wo.weight"].T
            theirs[f"{there}.attn.c_proj.bias"] = ours[f"{here}.attn.out_bias"]
            theirs[f"{there}.mlp.c_fc.weight"] = ours[f"{here}.mlp.up.weight"].T
            theirs[f"{there}.mlp.c_fc.bias"] = ours[f"{here}.mlp.up.bias"]
            theirs[f"{there}.mlp.c_proj.weight"] = ours[f"{here}.mlp.down.weight"].T
            theirs[f"{there}.mlp.c_proj.bias"] = ours[f"{here}.mlp.out_bias"]
        return theirs
