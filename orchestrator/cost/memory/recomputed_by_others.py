"""Bytes of a layer that other software recomputes, or keeps when it recomputes the rest."""

from __future__ import annotations

from orchestrator.cost.workload import Workload
from orchestrator.plan.expert_capacity import mlp_width
from orchestrator.plan.expert_mesh import fullest
from orchestrator.plan.layer import layer_moe


def repeated_modules(
    workload: Workload,
    layer: int,
    product: float,
    tensors: dict[str, float],
) -> float:
    """Returns the bytes that Megatron-Core's `layernorm`, `mla_up_proj` and `moe_act` recompute.

    DeepSeek-V3 used them (arXiv 2412.19437, section 3.2.3). These are outputs of norms; queries,
    keys and values made from their latents; and outputs of the experts' activations. `tensors` is
    the result of `layer_activations`; `product` is the bytes of an element of a matrix product's
    input.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    width = workload.width
    moe = layer_moe(model, layer)
    dropped = tensors["matmul inputs"]
    if model.mla is not None:
        latents = 2 * (model.mla.q_lora_rank + model.mla.kv_lora_rank) * width * workload.tokens
        dropped += tensors["attention"] - latents
    if moe is not None:
        ffn = mlp_width(model, moe, train.seq_len, fullest(parallel))
        dropped += ffn * product / parallel.tp * workload.tokens
    return dropped


def every_second_product(workload: Workload, layer: int) -> float:
    """Returns the bytes of the outputs of the first, third, ... matrix product of a layer.

    These are the products of queries, of values, the MLP's first and, in a gated MLP, its last.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    tp = parallel.tp
    heads = model.heads * model.head_dim + max(parallel.tp, model.kv_heads) * model.head_dim
    if model.mla is not None:
        heads = model.heads * (
            model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
        )
    ffn = mlp_width(model, layer_moe(model, layer), train.seq_len, fullest(parallel))
    rows = workload.sequence_shards
    last = model.hidden / rows if model.mlp == "gated" else 0
    return workload.tokens * workload.width * ((heads + ffn) / tp + last)
