"""The networks of `transformers` with a plan's weights: losses, terms and gradients of a batch, in
any precision.

Llama, Qwen3 (normalised heads), GPT-2 and DeepSeek-V3 are used unchanged, but for norms and rotary
angles, which `transformers` computes in fp32 whatever the weights are. A layer with experts has
`modules.Mixture` as its MLP, around the experts of `transformers`; a test compares the result with
whole models of Mixtral, Qwen3-MoE and DeepSeek-V3. Modules that predict further tokens are
`modules.Ahead` around one more layer of the same kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .choices import Choices
from .data import IGNORED, Batch
from .modules import Ahead, Angles, Mixture, RMSNorm, wider
from .names import theirs

Tensors = dict[str, Tensor]
#: Terms of the loss, by their names in reports.
BALANCE = "expert_balance"
Z = "router_z"
MTP = "mtp"
#: The keys of `model.moe` that this oracle computes; it refuses a plan with others.
_MOE = {
    "experts",
    "top_k",
    "ffn_hidden",
    "shared_ffn_hidden",
    "first_dense_layers",
    "score",
    "norm_topk",
}
_MOE |= {"routed_scale", "groups", "top_groups", "bias_update", "capacity_factor"}
_MOE |= {"balance_loss", "balance_over", "z_loss"}


class Unknown(ValueError):
    """The oracle has no network for the plan's model."""


@dataclass(frozen=True)
class Counts:
    """The divisors of a step's sums: its targets that count, its samples, and all its tokens."""

    valid: int
    samples: int
    tokens: int


@dataclass(frozen=True)
class Pass:
    """The results of a network for samples; floats in fp32 or wider, but for the gradients."""

    losses: Tensor  # [samples, sequence], of each token, 0 where its target does not count
    #: [samples, ...], each multiplied by its weight and divided: the sum is added to the loss
    terms: dict[str, Tensor]
    grads: Tensors  # of the loss with all terms, by our names, in the network's precision
    scores: dict[int, Tensor]  # by layer, [samples, sequence, experts]
    logits: dict[int, Tensor]  # [samples, sequence, k], of the choices
    weights: dict[int, Tensor]


class Decoder(nn.Module):
    """Maps (tokens, positions, mask, further tokens by depth) to logits, and those of each
    depth."""

    def __init__(self, body: Any, ahead: list[Ahead], gpt2: bool):
        super().__init__()
        self.body = body
        self.ahead = nn.ModuleList(ahead)
        self.gpt2 = gpt2

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, further: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        inner = self.body.transformer if self.gpt2 else self.body.model
        state = inner(
            input_ids=tokens, position_ids=positions, attention_mask=mask
        ).last_hidden_state
        logits = self.body.lm_head(state)
        later = list[Tensor]()
        options = {"attention_mask": mask}
        if not self.gpt2:
            options |= {
                "position_ids": positions,
                "position_embeddings": inner.rotary_emb(state, positions),
            }
        for module, token in zip(self.ahead, further, strict=True):
            state = module(state, inner.get_input_embeddings()(token), **options)
            later.append(self.body.lm_head(state))
        return logits, later


class Network:
    """A decoder in one precision."""

    def __init__(self, model: dict[str, Any], dtype: torch.dtype):
        """Builds the network of a plan's model. Raises Unknown."""
        self.model = model
        self.dtype = dtype
        self.moe = model.get("moe") or {}
        self.mla = model.get("mla") or {}
        self.mtp = model.get("mtp") or {}
        self.gpt2 = (model["norm"], model["position"], model["mlp"]) == (
            "layer",
            "learned",
            "plain",
        )
        if problem := self._unlike():
            raise Unknown(
                f"model {model['name']}: {problem}; the independent oracle has GPT-2, Llama, Qwen3,"
                " their like with experts, and DeepSeek-V3"
            )
        self.mixtures: dict[int, Mixture] = {}
        self.module = self._build()

    def _unlike(self) -> str:
        """Returns why the model is none of the known ones, or ""."""
        model = self.model
        if unknown_keys := sorted(set(self.moe) - _MOE):
            return f"moe.{unknown_keys[0]}"
        if not model["causal"]:
            return "no causal mask"
        if model.get("dropout"):
            return "dropout, whose masks are the trainer's own"
        if self.gpt2:
            same_heads = (
                model["heads"] * model["head_dim"] == model["hidden"]
                and model["kv_heads"] == model["heads"]
            )
            fits = (
                same_heads
                and model["bias"]
                and model["activation"] == "gelu"
                and not (self.moe or self.mla)
            )
            if fits:
                return ""
            return "GPT-2 has biases, gelu, as many key-value as query heads, hidden = heads x size"
        if (model["norm"], model["position"], model["mlp"], model["activation"]) != (
            "rms",
            "rope",
            "gated",
            "silu",
        ):
            return "Llama has RMSNorm, rotary positions and a gated silu"
        if model["bias"] and (self.moe or self.mla or model.get("qk_norm")):
            return "biases are Llama's"
        if model.get("yarn") and model["yarn"]["mscale_all_dim"] and not self.mla:
            return "stretched positions whose scores grow are DeepSeek-V3's"
        return "normalised heads are Qwen3's" if self.mla and model.get("qk_norm") else ""

    # ----------------------------------------------------------------------------------------------
    #     building

    def _build(self) -> Decoder:
        import transformers  # seconds; only the judge needs it

        config_name, model_name = self._classes()
        settings = self._gpt2_settings() if self.gpt2 else self._llama_settings()
        config = getattr(transformers, config_name)(**settings)
        body = getattr(transformers, model_name)(config).eval()
        layers = body.transformer.h if self.gpt2 else body.model.layers
        ahead = [
            type(layers[0])(config, self.model["layers"] - 1).eval()
            for _ in range(self.mtp.get("depth", 0))
        ]
        for number, layer in enumerate([*layers, *ahead]):
            if self.moe and number >= self.moe.get("first_dense_layers", 0):
                layer.mlp = self.mixtures[number] = self._mixture(transformers)
        modules = [
            Ahead(self.model["hidden"], layer, [self._norm() for _ in range(3)]) for layer in ahead
        ]
        decoder = Decoder(body, modules, self.gpt2)
        if not self.gpt2:
            self._replace_fp32_modules(decoder)
        return decoder.to(self.dtype)

    def _classes(self) -> tuple[str, str]:
        """Returns the names of the configuration and of the model in `transformers`."""
        if self.gpt2:
            return "GPT2Config", "GPT2LMHeadModel"
        family = "Llama"
        if self.mla:
            family = "DeepseekV3"
        elif self.model.get("qk_norm"):
            family = "Qwen3"
        return f"{family}Config", f"{family}ForCausalLM"

    def _norm(self) -> nn.Module:
        weight = torch.ones(self.model["hidden"])
        return (
            nn.LayerNorm(len(weight), self.model["norm_eps"]) if self.gpt2 else RMSNorm(weight, 0.0)
        )

    def _mixture(self, transformers: Any) -> Mixture:
        moe = self.moe
        hidden = self.model["hidden"]
        sizes = {
            "hidden_size": hidden,
            "num_local_experts": moe["experts"],
            "intermediate_size": moe["ffn_hidden"],
        }
        config = transformers.MixtralConfig(**sizes, experts_implementation="eager")
        experts = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
        shared = None
        if width := moe.get("shared_ffn_hidden", 0):
            shared_config = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=width)
            shared = transformers.models.llama.modeling_llama.LlamaMLP(shared_config)
        return Mixture(moe, hidden, experts, shared)

    def _llama_settings(self) -> dict[str, Any]:
        model = self.model
        mla = self.mla
        bias = {"attention_bias": self.model["bias"]}
        settings = {
            "vocab_size": model["vocab"],
            "hidden_size": model["hidden"],
            "intermediate_size": model["ffn_hidden"],
            "num_hidden_layers": model["layers"],
            "num_attention_heads": model["heads"],
            "head_dim": 2,
            "rms_norm_eps": model["norm_eps"],
            "max_position_embeddings": model["max_seq_len"],
            "use_cache": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
            "tie_word_embeddings": False,
            "attn_implementation": "sdpa",
        }
        if mla:
            settings |= mla | {"q_lora_rank": mla["q_lora_rank"] or None, "rope_interleave": False}
            settings |= {
                "num_key_value_heads": model["heads"],
                "first_k_dense_replace": model["layers"] + 1,
            }
            if model.get("yarn"):
                settings["rope_parameters"] |= {"rope_type": "yarn", **self._yarn_settings()}
            return settings
        settings |= {"num_key_value_heads": model["kv_heads"], "head_dim": model["head_dim"]}
        return settings | (bias if model.get("qk_norm") else bias | {"mlp_bias": model["bias"]})

    def _yarn_settings(self) -> dict[str, Any]:
        """Returns the settings by which `transformers` scales attention; the angles are ours."""
        yarn = self.model["yarn"]
        settings = {
            name: yarn[name] for name in ("factor", "beta_fast", "beta_slow", "mscale_all_dim")
        }
        return settings | {
            "mscale": yarn["mscale_all_dim"],
            "original_max_position_embeddings": yarn["original_seq_len"],
        }

    def _gpt2_settings(self) -> dict[str, Any]:
        model = self.model
        return {
            "vocab_size": model["vocab"],
            "n_embd": model["hidden"],
            "n_inner": model["ffn_hidden"],
            "n_layer": model["layers"],
            "n_head": model["heads"],
            "n_positions": model["max_seq_len"],
            "layer_norm_epsilon": model["norm_eps"],
            "activation_function": "gelu_new",
            "use_cache": False,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": False,
            "attn_implementation": "sdpa",
        }

    def _replace_fp32_modules(self, module: nn.Module) -> None:
        """Replaces norms and rotary angles by ones that compute in the network's precision."""
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(
                    module,
                    name,
                    RMSNorm(child.get_parameter("weight").detach(), self.model["norm_eps"]),
                )
            elif type(child).__name__.endswith("RotaryEmbedding"):
                size = self.mla["qk_rope_head_dim"] if self.mla else self.model["head_dim"]
                setattr(
                    module, name, Angles(self.model["rope_theta"], size, self.model.get("yarn"))
                )
            else:
                self._replace_fp32_modules(child)

    # ----------------------------------------------------------------------------------------------
    #     computing

    def run(
        self,
        weights: Mapping[str, Tensor],
        batch: Batch,
        counts: Counts,
        *,
        scale: float,
        choices: Choices,
        loads: Mapping[int, Tensor],
    ) -> Pass:
        """Computes forward and backward of a batch.

        `counts` are those of the whole step, of which `batch` may be a part; gradients are
        multiplied by `scale`. `loads` has by layer, if the whole batch is balanced, how often the
        step before chose each expert, over the mean.
        """
        leaves = {
            name: tensor.detach().to(self.dtype, copy=True).requires_grad_()
            for name, tensor in weights.items()
        }
        for layer, mixture in self.mixtures.items():
            mixture.chosen = choices.experts[layer]
            if layer in loads:
                mixture.load = loads[layer].to(wider(self.dtype))
        losses, terms = self._forward(leaves, batch, counts)
        total = losses.sum() / counts.valid + sum(term.sum() for term in terms.values())
        (total * scale).backward()
        grads = {}
        for name, leaf in leaves.items():
            grads[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return Pass(
            losses=losses.detach(),
            terms={name: term.detach() for name, term in terms.items()},
            grads=grads,
            scores=self._recorded("scores"),
            logits=self._recorded("logits"),
            weights=self._recorded("weights"),
        )

    def _forward(
        self, leaves: dict[str, Tensor], batch: Batch, counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses and the terms of a batch."""
        same_document = batch.documents[:, None, :, None] == batch.documents[:, None, None, :]
        further = [ahead(batch, depth) for depth in range(1, len(self.module.ahead) + 1)]
        further_tokens = [tokens for tokens, _ in further]
        inputs = batch.tokens, batch.positions, same_document.tril(), further_tokens
        logits, later = torch.func.functional_call(self.module, theirs(self.model, leaves), inputs)
        terms = self._terms(counts)
        if later:
            further_losses = [
                self._losses(later_logits, targets)
                for later_logits, (_, targets) in zip(later, further, strict=True)
            ]
            divisor = self.mtp["weight"] / len(later) / counts.valid
            terms[MTP] = torch.cat(further_losses, 1) * divisor
        return self._losses(logits, batch.targets), terms

    def _recorded(self, name: str) -> dict[int, Tensor]:
        """Returns a tensor of each layer's experts from the latest forward."""
        return {layer: getattr(mixture, name).detach() for layer, mixture in self.mixtures.items()}

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(wider(self.dtype)).flatten(0, 1)
        return F.cross_entropy(
            wide, targets.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(targets)

    def _terms(self, counts: Counts) -> dict[str, Tensor]:
        """Returns the terms of the experts of all layers in the latest forward."""
        terms = {}
        mixtures = self.mixtures.values()
        if weight := self.moe.get("balance_loss", 0.0):
            divisor = counts.tokens if self.moe.get("balance_over") == "batch" else counts.samples
            terms[BALANCE] = torch.stack([mixture.balance for mixture in mixtures], 1) * (
                weight / divisor
            )
        if weight := self.moe.get("z_loss", 0.0):
            terms[Z] = torch.cat([mixture.z for mixture in mixtures], 1) * (weight / counts.tokens)
        return terms


def ahead(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens that a module of this depth, from 1, reads, and its targets: at each token
    the one that is `depth` further (0 beyond the end) and its target, if it is in the sample and in
    the same document."""
    tokens = torch.zeros_like(batch.tokens)
    targets = torch.full_like(batch.targets, IGNORED)
    tokens[:, :-depth] = batch.tokens[:, depth:]
    same_document = batch.documents[:, depth:] == batch.documents[:, :-depth]
    targets[:, :-depth] = batch.targets[:, depth:].where(same_document, torch.tensor(IGNORED))
    return tokens, targets
