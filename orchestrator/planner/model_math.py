"""Parameter and FLOP counts of a transformer, from its shapes alone.

Every function takes a model by its shape attributes (`orchestrator.plan.document.Model` or the config's `ModelSpec`)
and returns exact integers (parameters) or floats (FLOPs, multiply and add counted as two).

Sources: Narayanan et al. 2021 (arXiv 2104.04473) equations 2 and 3; Korthikanti et al. 2022 (arXiv 2205.05198)
appendix A; Shazeer 2019 (arXiv 1911.02150) for shared key-value heads; DeepSeek-V3 (arXiv 2412.19437) for MLA and MoE.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct


class Shape(Protocol):
    """The attributes that counting needs; `document.Model` documents each."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    max_seq_len: int
    norm: str
    position: str
    mlp: str
    bias: bool
    tied_embeddings: bool
    causal: bool
    moe: Any
    mla: Any
    extra_params: dict[str, int]


class LayerParams(Struct, frozen=True):
    """Trainable parameters of one decoder layer, by the way that parallelism treats them."""

    attention: int  # matmul weights and their column biases: divided by tp
    ffn: int  # dense MLP and shared experts: divided by tp
    experts: int  # all routed experts together: divided by tp * ep
    replicated: int  # norms, router, row biases, MLA down-projections: a copy on every tp rank

    @property
    def total(self) -> int:
        return self.attention + self.ffn + self.experts + self.replicated


def _mlp(hidden: int, width: int, gated: bool, bias: bool) -> tuple[int, int]:
    """(tp-divided, replicated) parameters of one MLP: gate and up are columns, down is rows and owns a whole bias."""
    columns = 2 if gated else 1
    return (columns + 1) * hidden * width + (columns * width if bias else 0), hidden if bias else 0


def _attention(model: Shape) -> tuple[int, int]:
    """(tp-divided, replicated) parameters of one attention, without the layer's norms."""
    h = model.hidden
    if model.mla is not None:
        m = model.mla
        query_key = m.qk_nope_head_dim + m.qk_rope_head_dim
        up = model.heads * (m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim) + m.v_head_dim * h)
        down = h * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank  # and the norm of the latent
        if m.q_lora_rank:
            up += m.q_lora_rank * model.heads * query_key
            down += h * m.q_lora_rank + m.q_lora_rank
        else:
            up += h * model.heads * query_key
        return up, down
    queries, key_values = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
    split = h * (queries + key_values) + queries * h
    return (split + queries + key_values, h) if model.bias else (split, 0)


def norm_params(model: Shape) -> int:
    """One normalisation: RMSNorm has a weight, LayerNorm a weight and a bias."""
    return model.hidden * (1 if model.norm == "rms" else 2)


def is_moe_layer(model: Shape, layer: int) -> bool:
    return model.moe is not None and layer >= model.moe.first_dense_layers


def layer_params(model: Shape, layer: int) -> LayerParams:
    """Trainable parameters of decoder layer `layer` (0-based)."""
    gated = model.mlp == "gated"
    attention, replicated = _attention(model)
    replicated += 2 * norm_params(model)
    if not is_moe_layer(model, layer):
        ffn, row_bias = _mlp(model.hidden, model.ffn_hidden, gated, model.bias)
        return LayerParams(attention, ffn, 0, replicated + row_bias)
    moe = model.moe
    expert = sum(_mlp(model.hidden, moe.ffn_hidden, gated, model.bias))
    shared, row_bias = _mlp(model.hidden, moe.shared_ffn_hidden, gated, model.bias) if moe.shared_ffn_hidden else (0, 0)
    router = model.hidden * moe.experts
    return LayerParams(attention, shared, moe.experts * expert, replicated + router + row_bias)


def embedding_params(model: Shape) -> tuple[int, int]:
    """(token table, position table): the first is divided by tp over the vocabulary, the second is replicated."""
    return model.vocab * model.hidden, model.max_seq_len * model.hidden if model.position == "learned" else 0


def parameter_count(model: Shape) -> int:
    """Every parameter that the published figure counts: layers, embeddings, final norm, head, `extra_params`.

    For GPT-style models this is N = h*V + L*(12 h^2 + 13 h) + 2h (+ s_max*h), planning.md C1.
    """
    table, positions = embedding_params(model)
    head = 0 if model.tied_embeddings else table
    layers = sum(layer_params(model, layer).total for layer in range(model.layers))
    return table + positions + layers + norm_params(model) + head + sum(model.extra_params.values())


# ---------------------------------------------------------------------------------------------- FLOPs


class LayerFlops(Struct, frozen=True):
    """Forward FLOPs of one layer and one token."""

    attention_gemm: float
    attention_core: float  # scores and weighted values; halved when causal
    ffn_gemm: float

    @property
    def total(self) -> float:
        return self.attention_gemm + self.attention_core + self.ffn_gemm


def layer_flops(model: Shape, layer: int, seq_len: int) -> LayerFlops:
    """Forward FLOPs per token of decoder layer `layer` at sequence length `seq_len`.

    Matmuls are 2 FLOPs a weight; norms and activations are memory-bound and not counted. Causal attention counts the
    lower triangle only (half), the convention of `6*N + 6*L*h*s` (planning.md C1).
    """
    h = model.hidden
    columns = 3 if model.mlp == "gated" else 2
    if model.mla is not None:
        m = model.mla
        query_key = m.qk_nope_head_dim + m.qk_rope_head_dim
        weights = h * (m.kv_lora_rank + m.qk_rope_head_dim)
        weights += model.heads * (m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim) + m.v_head_dim * h)
        weights += m.q_lora_rank * (h + model.heads * query_key) if m.q_lora_rank else h * model.heads * query_key
        widths = model.heads * (query_key + m.v_head_dim)
    else:
        weights = h * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        widths = 2 * model.heads * model.head_dim
    if is_moe_layer(model, layer):
        moe = model.moe
        ffn = columns * h * (moe.top_k * moe.ffn_hidden + moe.shared_ffn_hidden) + h * moe.experts
    else:
        ffn = columns * h * model.ffn_hidden
    core = 2.0 * widths * seq_len * (0.5 if model.causal else 1.0)
    return LayerFlops(2.0 * weights, core, 2.0 * ffn)


def head_flops(model: Shape) -> float:
    """Forward FLOPs per token of the output projection."""
    return 2.0 * model.hidden * model.vocab


def model_flops_per_token(model: Shape, seq_len: int) -> float:
    """Model FLOPs per token, forward and backward: 6*N_matmul + 6*L*h*s (causal) or 12*L*h*s (full attention).

    The token table is a lookup and costs nothing; the head costs 6*V*h even when its weight is tied. MFU is measured
    against this number, so recomputation never raises it.
    """
    layers = sum(layer_flops(model, layer, seq_len).total for layer in range(model.layers))
    return 3.0 * (layers + head_flops(model))


def hardware_flops_per_token(model: Shape, seq_len: int, recompute: str) -> float:
    """FLOPs per token that are really executed: recomputation adds a forward of what it dropped.

    `recompute`: "none"; "selective" re-runs the attention core; "full" re-runs every layer (not the head), which gives
    the 96*B*s*L*h^2*(1 + s/6h + V/16Lh) of arXiv 2104.04473 for GPT shapes with full attention.
    """
    flops = [layer_flops(model, layer, seq_len) for layer in range(model.layers)]
    again = {
        "none": 0.0,
        "selective": sum(f.attention_core for f in flops),
        "full": sum(f.total for f in flops),
    }[recompute]
    return model_flops_per_token(model, seq_len) + again


def active_parameters(model: Shape) -> int:
    """Parameters that one token touches (MoE: `top_k` of the routed experts)."""
    total = parameter_count(model)
    if model.moe is None:
        return total
    idle = (model.moe.experts - model.moe.top_k) / model.moe.experts
    return total - sum(round(layer_params(model, layer).experts * idle) for layer in range(model.layers))
