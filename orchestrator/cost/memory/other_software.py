"""Bytes of a layer that other software keeps, recomputes, or keeps when it recomputes the rest.

Its latent attention and mixtures of experts have a coarser estimate than the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Mla, Moe
from orchestrator.plan.expert_capacity import mlp_width, taken_choices
from orchestrator.plan.expert_mesh import fullest
from orchestrator.plan.layer import Half, SavedTensor, layer_moe

from .kept_tensors import KeptTensor, activation_copies, core_tensors, product_input
from .kernels import Kernels

MADE_OF_LATENTS = "queries, keys and values of latents"


def latent_attention(workload: Workload, mla: Mla, kernels: Kernels) -> Iterator[KeptTensor]:
    """Yields what latent attention keeps: latents before and after their norms, heads, output."""
    width = workload.width
    heads = workload.model.heads / workload.parallel.tp
    yield from _inputs("attention", workload, kernels)
    key = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latents = (mla.q_lora_rank * 2 + mla.kv_lora_rank * 2) * width
    made_of_latents = heads * (2 * key + mla.v_head_dim) * width
    yield KeptTensor("attention", "latents", "product", latents)
    yield KeptTensor("attention", MADE_OF_LATENTS, "product", made_of_latents)
    if kernels.copied_heads:
        size = latents + made_of_latents
        yield KeptTensor("attention", f"{MADE_OF_LATENTS}, as projected", "product", size)
    output = heads * mla.v_head_dim
    exchanged = workload.parallel.cp > 1 and workload.parallel.cp_method == "ulysses"
    yield KeptTensor("attention", "attn.core", "core", output * width * (1 + exchanged))
    if kernels.product_width:
        size = output * kernels.product_width
        yield KeptTensor("attention", "attn.core, narrow", "copy", size)
    yield from core_tensors(workload, kernels)


def experts(workload: Workload, moe: Moe, kernels: Kernels) -> Iterator[KeptTensor]:
    """Yields what experts keep: routed tokens, their own tensors, scores and choices."""
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    width = workload.width
    yield from _inputs("mlp", workload, kernels)
    gathered = 1 if kernels.keep_gathered else workload.sequence_shards
    narrow = kernels.product_width or width  # of the input of the last product
    load = fullest(parallel)
    choices = taken_choices(moe, train.seq_len) * load
    # Inputs and outputs of experts.
    routed = choices * model.hidden * (narrow + width * kernels.expert_outputs) / gathered
    yield KeptTensor("mlp", "routed tokens", "copy", routed)
    ffn = mlp_width(model, moe, train.seq_len, load) / parallel.tp
    copies = activation_copies(workload, kernels)
    activation_width = narrow if kernels.narrow_activation else width
    yield KeptTensor("mlp", "mlp", "product", ffn * copies * activation_width)
    yield KeptTensor("mlp", "mlp.activation", "activation", ffn * narrow)
    yield KeptTensor("mlp", "router", "routing", 8 * moe.experts)


def _inputs(half: Half, workload: Workload, kernels: Kernels) -> Iterator[KeptTensor]:
    """Yields the inputs of a half's norm and of its first matrix products."""
    index = 1 if half == "attention" else 2
    features = workload.model.hidden
    rows = workload.sequence_shards
    size = features * workload.width / rows
    yield KeptTensor(half, f"input of norm{index}", "residual", size)
    saved = SavedTensor(f"norm{index}", features, "regathered", "norm")
    yield from product_input(half, saved, workload, kernels)


def repeated_modules(layer_tensors: Sequence[KeptTensor], has_experts: bool) -> float:
    """Returns the bytes per token that Megatron-Core's `layernorm`, `mla_up_proj` and `moe_act`
    recompute.

    DeepSeek-V3 used them (arXiv 2412.19437, section 3.2.3). These are outputs of norms; queries,
    keys and values made from their latents; and outputs of the experts' activations.
    """
    return sum(
        tensor.size
        for tensor in layer_tensors
        if tensor.name.startswith("norm")
        or tensor.name == MADE_OF_LATENTS
        or (has_experts and tensor.writer == "activation")
    )


def every_second_product(workload: Workload, layer: int) -> float:
    """Returns the bytes of the outputs of the first, third, ... matrix product of a layer.

    These are the products of queries, of values, the MLP's first and, in a gated MLP, its last.
    """
    model = workload.model
    tp = workload.parallel.tp
    key_heads = max(tp, model.kv_heads)
    heads = (model.heads + key_heads) * model.head_dim
    if model.mla is not None:
        mla = model.mla
        features = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        heads = model.heads * features
    moe = layer_moe(model, layer)
    load = fullest(workload.parallel)
    ffn = mlp_width(model, moe, workload.train.seq_len, load)
    outputs = (heads + ffn) / tp
    if model.mlp == "gated":
        outputs += model.hidden / workload.sequence_shards
    return workload.tokens * workload.width * outputs
