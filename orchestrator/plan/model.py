"""The model's part of the plan."""

from __future__ import annotations

from typing import Literal, dataclass_transform

from msgspec import UNSET, Struct, UnsetType


# Type checkers do not know what msgspec does with the options of the base class.
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Frozen(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every part of a plan: immutable, and strict about unknown keys when decoded."""


class Moe(Frozen):
    """A mixture of experts: its shapes, how tokens choose, how their load is balanced."""

    experts: int  # routed experts of a layer
    top_k: int  # experts that each token uses
    ffn_hidden: int  # inner width of one routed expert
    shared_ffn_hidden: int = 0  # inner width of all shared experts together
    first_dense_layers: int = 0  # layers at the start that have no experts
    score: Literal["softmax", "sigmoid"] = "softmax"  # how router logits become weights
    norm_topk: bool = True  # the weights of a token's experts are divided by their sum
    routed_scale: float = 1.0  # factor of those weights after the division
    groups: int = 1  # groups of neighbouring experts, of which a token may use `top_groups`
    top_groups: int = 1  # groups that the experts of a token may be in
    balance_loss: float = 0.0  # weight of the balance of choices in the loss
    z_loss: float = 0.0  # weight of the squared log-sum-exp of router logits in the loss
    # Options below are UNSET if unused: plans do not contain them, and older plans keep their hash.
    #: what balance_loss balances: each sequence, or the batch
    balance_over: Literal["sequence", "batch"] | UnsetType = UNSET
    #: step by which each expert's bias moves towards an equal load
    bias_update: float | UnsetType = UNSET
    #: equal shares of a sequence that an expert takes; it drops the other tokens
    capacity_factor: float | UnsetType = UNSET
    #: largest distance from 1 of the random factors on the router's input
    jitter: float | UnsetType = UNSET


class Yarn(Frozen):
    """Rotary positions stretched to longer sequences (YaRN, arXiv 2309.00071), with DeepSeek-V3's
    defaults."""

    factor: float  # how much longer sequences may be
    original_seq_len: int  # the length before stretching
    #: rotations over the original length above which a dimension is not stretched
    beta_fast: float = 32.0
    #: rotations over the original length below which a dimension is slowed down by `factor`
    beta_slow: float = 1.0
    #: attention scores grow by (0.1 * mscale_all_dim * ln(factor) + 1)^2; 0: they do not grow
    mscale_all_dim: float = 1.0


class Mtp(Frozen):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): `depth` modules, each of
    which predicts one token further."""

    depth: int  # modules, each for one token further
    #: weight of the mean of the modules' losses; DeepSeek-V3 begins with 0.3 and ends with 0.1
    weight: float = 0.3


class Mla(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int  # width of the latent queries
    kv_lora_rank: int  # width of the latent keys and values
    qk_nope_head_dim: int  # width of a head's queries and keys without positions
    qk_rope_head_dim: int  # width of their part with positions
    v_head_dim: int  # width of a head's values


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
    activation: Literal["silu", "gelu", "gelu_erf"]
    bias: bool
    tied_embeddings: bool
    causal: bool
    parameters: int  # derived total
    source: str
    dropout: float = 0.0
    moe: Moe | None = None
    mla: Mla | None = None
    #: parameters outside the decoder (BERT's token types, pooler): counted, not trained
    extra_params: dict[str, int] = {}
    # Options below are UNSET if a model does not have them: plans do not contain them, and older
    # plans keep their hash.
    #: RMSNorm of each query and key head before the positions (Qwen3)
    qk_norm: bool | UnsetType = UNSET
    yarn: Yarn | UnsetType = UNSET
    mtp: Mtp | UnsetType = UNSET
    #: kind of the layers, of `orchestrator.plan.layer.KINDS`; UNSET: "pre_norm"
    block: str | UnsetType = UNSET
    #: a matrix, the activation and a norm before the output projection, which has a bias (BERT)
    head_transform: bool | UnsetType = UNSET
