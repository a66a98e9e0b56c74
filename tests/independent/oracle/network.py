"""The networks of `transformers` with a plan's weights: losses, terms and gradients of a batch, in
any precision.

Llama, Qwen3 (normalised heads), GPT-2 and DeepSeek-V3 are taken as they are, but for norms and
rotary angles, which `transformers` computes in fp32 whatever the weights are. A layer with experts
has `modules.Mixture` for its MLP, around the experts of `transformers`; a test holds what comes of
it against Mixtral, Qwen3-MoE and DeepSeek-V3 whole. Modules that predict further tokens are
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
#: Of `model.moe`, what is computed here; a plan with more is refused rather than judged without it.
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
    """The plan's model is none that there is here."""


@dataclass(frozen=True)
class Counts:
    """What a step's sums are divided by: its targets that count, its samples, and all its
    tokens."""

    valid: int
    samples: int
    tokens: int


@dataclass(frozen=True)
class Pass:
    """What a network makes of samples; floats in fp32 or wider but for the gradients."""

    losses: Tensor  # [samples, sequence], of each token, 0 where its target does not count
    terms: dict[
        str, Tensor
    ]  # [samples, ...], each multiplied by its weight and divided: the sum is added to the loss
    grads: Tensors  # of the loss with all terms, by our names, in the network's precision
    scores: dict[int, Tensor]  # by layer, [samples, sequence, experts]
    logits: dict[int, Tensor]  # [samples, sequence, k], of the choices
    weights: dict[int, Tensor]


class Decoder(nn.Module):
    """(tokens, positions, mask, further tokens by depth) -> logits, and those of each depth."""

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
        words = {"attention_mask": mask}
        if not self.gpt2:
            words |= {
                "position_ids": positions,
                "position_embeddings": inner.rotary_emb(state, positions),
            }
        for module, token in zip(self.ahead, further, strict=True):
            state = module(state, inner.get_input_embeddings()(token), **words)
            later.append(self.body.lm_head(state))
        return logits, later


class Network:
    """A decoder in one precision."""

    def __init__(self, model: dict[str, Any], dtype: torch.dtype):
        """`model`: of the plan. Raises Unknown."""
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
        """Why it is none of them, or nothing."""
        model = self.model
        if odd := sorted(set(self.moe) - _MOE):
            return f"moe.{odd[0]}"
        if not model["causal"]:
            return "no causal mask"
        if model.get("dropout"):
            return "dropout, whose masks are the trainer's own"
        if self.gpt2:
            same = (
                model["heads"] * model["head_dim"] == model["hidden"]
                and model["kv_heads"] == model["heads"]
            )
            fits = (
                same
                and model["bias"]
                and model["activation"] == "gelu"
                and not (self.moe or self.mla)
            )
            return (
                ""
                if fits
                else (
                    "GPT-2 has biases, gelu, as many key-value as query heads, hidden = heads x"
                    " size"
                )
            )
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

        kind = (
            "GPT2"
            if self.gpt2
            else "DeepseekV3"
            if self.mla
            else "Qwen3"
            if self.model.get("qk_norm")
            else "Llama"
        )
        config = getattr(transformers, f"{kind}Config")(
            **(self._gpt2_words() if self.gpt2 else self._llama_words())
        )
        body = getattr(transformers, "GPT2LMHeadModel" if self.gpt2 else f"{kind}ForCausalLM")(
            config
        ).eval()
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
            self._exact(decoder)
        return decoder.to(self.dtype)

    def _norm(self) -> nn.Module:
        weight = torch.ones(self.model["hidden"])
        return (
            nn.LayerNorm(len(weight), self.model["norm_eps"]) if self.gpt2 else RMSNorm(weight, 0.0)
        )

    def _mixture(self, transformers: Any) -> Mixture:
        moe = self.moe
        hidden = self.model["hidden"]
        words = {
            "hidden_size": hidden,
            "num_local_experts": moe["experts"],
            "intermediate_size": moe["ffn_hidden"],
        }
        config = transformers.MixtralConfig(**words, experts_implementation="eager")
        experts = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
        shared = None
        if width := moe.get("shared_ffn_hidden", 0):
            plain = transformers.LlamaConfig(hidden_size=hidden, intermediate_size=width)
            shared = transformers.models.llama.modeling_llama.LlamaMLP(plain)
        return Mixture(moe, hidden, experts, shared)

    def _llama_words(self) -> dict[str, Any]:
        model = self.model
        mla = self.mla
        bias = {"attention_bias": self.model["bias"]}
        words = {
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
            words |= mla | {"q_lora_rank": mla["q_lora_rank"] or None, "rope_interleave": False}
            words |= {
                "num_key_value_heads": model["heads"],
                "first_k_dense_replace": model["layers"] + 1,
            }
            if model.get("yarn"):
                words["rope_parameters"] |= {"rope_type": "yarn", **self._yarn_words()}
            return words
        words |= {"num_key_value_heads": model["kv_heads"], "head_dim": model["head_dim"]}
        return words | (bias if model.get("qk_norm") else bias | {"mlp_bias": model["bias"]})

    def _yarn_words(self) -> dict[str, Any]:
        """What `transformers` scales attention by; the angles are ours."""
        yarn = self.model["yarn"]
        words = {
            name: yarn[name] for name in ("factor", "beta_fast", "beta_slow", "mscale_all_dim")
        }
        return words | {
            "mscale": yarn["mscale_all_dim"],
            "original_max_position_embeddings": yarn["original_seq_len"],
        }

    def _gpt2_words(self) -> dict[str, Any]:
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

    def _exact(self, module: nn.Module) -> None:
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
                self._exact(child)

    # ----------------------------------------------------------------------------------------------
    #     computing

    def run(
        self,
        weights: Mapping[str, Tensor],
        batch: Batch,
        counts: Counts,
        scale: float,
        choices: Choices,
        loads: Mapping[int, Tensor],
    ) -> Pass:
        """`counts`: of the whole step, of which `batch` may be a part; gradients are multiplied by
        `scale`. `loads`: by layer, where the whole batch is balanced, how often the step before
        chose each expert, over the mean."""
        leaves = {
            name: tensor.detach().to(self.dtype, copy=True).requires_grad_()
            for name, tensor in weights.items()
        }
        for layer, mixture in self.mixtures.items():
            mixture.chosen = choices.experts[layer]
            if layer in loads:
                mixture.load = loads[layer].to(wider(self.dtype))
        same = batch.documents[:, None, :, None] == batch.documents[:, None, None, :]
        further = [ahead(batch, depth) for depth in range(1, len(self.module.ahead) + 1)]
        inputs = batch.tokens, batch.positions, same.tril(), [tokens for tokens, _ in further]
        logits, later = torch.func.functional_call(self.module, theirs(self.model, leaves), inputs)
        losses = self._losses(logits, batch.targets)
        terms = self._terms(counts)
        if later:
            each = [
                self._losses(one, targets) for one, (_, targets) in zip(later, further, strict=True)
            ]
            terms[MTP] = torch.cat(each, 1) * (self.mtp["weight"] / len(later) / counts.valid)
        total = losses.sum() / counts.valid + sum(one.sum() for one in terms.values())
        (total * scale).backward()
        none = {name: torch.zeros_like(leaf) for name, leaf in leaves.items() if leaf.grad is None}
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        seen = [
            {layer: getattr(mixture, what).detach() for layer, mixture in self.mixtures.items()}
            for what in ("scores", "logits", "weights")
        ]
        return Pass(
            losses.detach(),
            {name: one.detach() for name, one in terms.items()},
            grads | none,
            *seen,
        )

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(wider(self.dtype)).flatten(0, 1)
        return F.cross_entropy(
            wide, targets.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(targets)

    def _terms(self, counts: Counts) -> dict[str, Tensor]:
        """Of the experts of all layers in the latest forward."""
        found = {}
        mixtures = self.mixtures.values()
        if weight := self.moe.get("balance_loss", 0.0):
            many = counts.tokens if self.moe.get("balance_over") == "batch" else counts.samples
            found[BALANCE] = torch.stack([one.balance for one in mixtures], 1) * (weight / many)
        if weight := self.moe.get("z_loss", 0.0):
            found[Z] = torch.cat([one.z for one in mixtures], 1) * (weight / counts.tokens)
        return found


def ahead(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """What a module of this depth, from 1, reads and predicts at each token: the token so many
    places on (0 behind the end) and that one's target, if it lies in the sample and in the same
    document."""
    tokens = torch.zeros_like(batch.tokens)
    targets = torch.full_like(batch.targets, IGNORED)
    tokens[:, :-depth] = batch.tokens[:, depth:]
    same = batch.documents[:, depth:] == batch.documents[:, :-depth]
    targets[:, :-depth] = batch.targets[:, depth:].where(same, torch.tensor(IGNORED))
    return tokens, targets
