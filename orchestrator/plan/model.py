"""The model's part of the plan."""

from __future__ import annotations

from typing import Literal, dataclass_transform

from msgspec import UNSET, Struct, UnsetType


@dataclass_transform(
    frozen_default=True, kw_only_default=True
)  # what msgspec does, told to type checkers
class Frozen(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every part: immutable, strict about unknown keys when decoded."""


class Moe(Frozen):
    """A mixture of experts: its shapes, how tokens choose, how their load is balanced."""

    experts: int
    top_k: int
    ffn_hidden: int  # of one routed expert
    shared_ffn_hidden: int = 0  # of all shared experts together
    first_dense_layers: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True  # the weights of a token's experts are divided by their sum
    routed_scale: float = 1.0  # and multiplied with this
    groups: int = 1  # of neighbouring experts, of which a token may use `top_groups`
    top_groups: int = 1
    balance_loss: float = 0.0  # by what the balance of each sequence's choices counts in the loss
    z_loss: float = 0.0  # the same of the square of each token's log-sum-exp of router logits
    # UNSET where not asked for: then plans do not name it, and older ones keep their hash.
    balance_over: Literal["sequence", "batch"] | UnsetType = (
        UNSET  # what balance_loss balances: each sequence, all
    )
    bias_update: float | UnsetType = (
        UNSET  # by what a step moves each expert's bias towards an equal load
    )
    capacity_factor: float | UnsetType = (
        UNSET  # an expert takes this many equal shares of each sequence, drops the rest
    )
    jitter: float | UnsetType = (
        UNSET  # what routers read is multiplied by random numbers up to this far from 1
    )


class Yarn(Frozen):
    """Rotary positions stretched to longer sequences (YaRN, arXiv 2309.00071), with DeepSeek-V3's
    defaults."""

    factor: float
    original_seq_len: int
    beta_fast: float = (
        32.0  # dimensions that turn more often than this over the original length stay as they are
    )
    beta_slow: float = 1.0  # those that turn less often are slowed down by `factor`
    mscale_all_dim: float = (
        1.0  # attention scores grow by (0.1 * this * ln(factor) + 1)^2; 0: they do not
    )


class Mtp(Frozen):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): `depth` modules, each a
    token further."""

    depth: int
    weight: float = (
        0.3  # of the mean of their losses, beside the main one; DeepSeek-V3's, which ends with 0.1
    )


class Mla(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Model(Frozen):
    """A transformer by its shapes. Parameter and FLOP counts are derived, never stored by hand."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    max_seq_len: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    position: Literal["rope", "learned", "none"]
    rope_theta: float
    mlp: Literal["gated", "plain"]
    activation: Literal["silu", "gelu"]
    bias: bool
    tied_embeddings: bool
    causal: bool
    parameters: int  # derived total
    source: str
    dropout: float = 0.0
    moe: Moe | None = None
    mla: Mla | None = None
    extra_params: dict[
        str, int
    ] = {}  # outside the decoder (BERT's token types, pooler): counted, not trained
    # What follows is UNSET where a model does not have it: then plans do not name it, and older
    # ones keep their hash.
    qk_norm: bool | UnsetType = (
        UNSET  # RMSNorm of each query and key head before the positions (Qwen3)
    )
    yarn: Yarn | UnsetType = UNSET
    mtp: Mtp | UnsetType = UNSET
