"""Bytes on the worst rank, by category: model states, activations, buffers.

States follow ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3) with the recipes of planning.md C2. Activations are
counted tensor by tensor as the trainer's autograd keeps them; with every option of the paper switched on the sum is
that of Korthikanti et al. (arXiv 2205.05198, equations 1 to 4), which the tests check.
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.document import Cluster, Memory, Model, Parallel, Train

from .model_math import is_moe_layer, layer_groups, layer_params, parameter_count, samples_of_kinds
from .pipeline import in_flight, rank_stages
from .profile import Profile, profile_for
from .traffic import WIDTH, rank_parameters, stage_range


class Kernels(Struct, frozen=True, kw_only=True):
    """Which tensors the implementation keeps for backward."""

    fused_attention: bool = True  # scores are recomputed in the kernel: only its softmax statistics stay
    keep_gathered: bool = True  # with SP, matmul inputs are kept whole (ours) or gathered again in backward (Megatron)
    fused_activation: bool = False  # the gated activation keeps its two inputs only


class States(Struct, frozen=True):
    """Bytes of weights, gradients and optimizer on one rank."""

    params: float
    grads: float
    optimizer: float


def model_states(dense: int, experts: int, parallel: Parallel, train: Train) -> States:
    """States of a rank that holds `dense` and `experts` parameters (before data-parallel sharding).

    Weights in the training precision; gradients in `grad_dtype`, whole until they are reduced (ZeRO-0 and 1); AdamW's
    two moments in fp32, and an fp32 master copy when the weights are narrower. Experts shard over cp * dp, all other
    weights over cp * ep * dp.
    """
    params = grads = optimizer = 0.0
    for count, replicas in ((dense, parallel.cp * parallel.ep * parallel.dp), (experts, parallel.cp * parallel.dp)):
        each = state_bytes(replicas, parallel, train)
        params += count * each.params
        grads += count * each.grads
        optimizer += count * each.optimizer
    return States(params, grads, optimizer)


def state_bytes(replicas: int, parallel: Parallel, train: Train) -> States:
    """Of one parameter that `replicas` ranks hold."""
    weight, gradient = WIDTH[train.precision], WIDTH[train.grad_dtype]
    shards = min(replicas, parallel.zero_group or replicas)
    return States(
        params=weight / (shards if parallel.zero >= 3 else 1),
        grads=gradient / (shards if parallel.zero >= 2 else 1),
        optimizer=(8 if weight == 4 else 12) / (shards if parallel.zero >= 1 else 1),
    )


def layer_activations(
    model: Model, layer: int, tokens: float, parallel: Parallel, train: Train, kernels: Kernels
) -> dict[str, float]:
    """Bytes that one layer keeps for backward, by tensor. tokens: of one micro-batch on this rank (b * s / cp)."""
    width, tp = WIDTH[train.precision], parallel.tp
    rows = tp if parallel.sp else 1  # what is cut along the sequence between the blocks
    gathered = 1 if kernels.keep_gathered or not parallel.sp else tp
    kept = {
        "norm inputs": 2 * model.hidden * width / rows,
        "matmul inputs": 2 * model.hidden * width / gathered,
        **_attention(model, parallel, train, kernels, width),
        **_mlp(model, layer, parallel, kernels, width, gathered),
    }
    if model.dropout:
        kept["dropout masks"] = 2 * model.hidden / rows
    return {name: size * tokens for name, size in kept.items()}


def _attention(model: Model, parallel: Parallel, train: Train, kernels: Kernels, width: int) -> dict[str, float]:
    """Bytes a token of queries, keys, values, attention output and what the softmax keeps."""
    tp = parallel.tp
    heads, kv_heads = model.heads / tp, max(1.0, model.kv_heads / tp)
    if model.mla is not None:
        m = model.mla
        key = m.qk_nope_head_dim + m.qk_rope_head_dim
        elements = heads * (2 * key + 2 * m.v_head_dim) + m.q_lora_rank * 2 + m.kv_lora_rank * 2
    else:
        elements = (2 * heads + 2 * kv_heads) * model.head_dim
    kept = {"attention": elements * width}
    if kernels.fused_attention:
        kept["softmax statistics"] = 4 * heads
    elif train.recompute == "none":
        # softmax output and the dropped-out copy that multiplies the values; with dropout a mask of one byte
        kept["attention scores"] = heads * train.seq_len * (2 * width + (1 if model.dropout else 0))
    return kept


def _mlp(model: Model, layer: int, parallel: Parallel, kernels: Kernels, width: int, gathered: int) -> dict[str, float]:
    """Bytes a token: inputs of the activation, its output, and what multiplies the down projection."""
    copies = 2 if model.mlp == "plain" else (3 if kernels.fused_activation else 4)
    if not is_moe_layer(model, layer):
        return {"mlp": copies * model.ffn_hidden * width / parallel.tp}
    moe = model.moe
    ffn = moe.top_k * moe.ffn_hidden + moe.shared_ffn_hidden
    routed = 2 * moe.top_k * model.hidden / gathered  # what arrives at the experts, and what they give back
    return {"mlp": copies * ffn * width / parallel.tp, "routed tokens": routed * width, "router": 8 * moe.experts}


def activations(model: Model, parallel: Parallel, train: Train, kernels: Kernels | None = None) -> list[float]:
    """Bytes kept for backward at the peak of each pipeline rank, logits included."""
    # the masks of dropout are not in a fused kernel; context parallelism makes its blocks again in backward
    kernels = kernels or Kernels(fused_attention=not model.dropout or parallel.cp > 1)
    width = WIDTH[train.precision]
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    rows = parallel.tp if parallel.sp else 1
    boundary = model.hidden * width / rows * tokens
    tensors = [
        {} if layer is None else layer_activations(model, layer, tokens, parallel, train, kernels)
        for layer in samples_of_kinds(model)
    ]
    whole = [sum(kind.values()) for kind in tensors]
    kept_by = {
        "none": whole,
        "selective": [selective_bytes(kind, kernels) for kind in tensors],
        "full": [boundary] * len(whole),
    }
    result = []
    for stages, flying in zip(rank_stages(parallel), in_flight(parallel), strict=True):
        ranges = [stage_range(parallel, stage) for stage in stages]
        groups = layer_groups(model, train, ranges)
        held = sum(n * kept_by[mode][kind] for kind, mode, n in groups)
        # the layer being recomputed has everything, beside the input that it kept
        again = {"none": [0.0] * len(whole), "selective": _less(whole, kept_by["selective"]), "full": whole}
        live = max((again[mode][kind] for kind, mode, n in groups if n), default=0.0)
        kept = held / len(stages) * flying + live
        if len(parallel.stage_layers) - 1 in stages:
            kept += head_bytes(model, parallel, train, kernels)
        result.append(kept)
    return result


def selective_bytes(kept: dict[str, float], kernels: Kernels) -> float:
    """What the trainer's selective recomputation keeps of a layer: its inputs, matrix products, attention. The norms'
    outputs and the activation function's are made again. Without fused attention only its scores are left out."""
    if not kernels.fused_attention:
        return sum(kept.values())
    return sum(kept.values()) - kept.get("matmul inputs", 0.0) - kept.get("mlp", 0.0) / 2


def _less(whole: list[float], kept: list[float]) -> list[float]:
    return [a - b for a, b in zip(whole, kept, strict=True)]


def head_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> float:
    """Bytes that the last stage keeps besides its layers: around the final norm, and the logits with their gradient."""
    width, tokens = WIDTH[train.precision], parallel.micro_batch_size * train.seq_len / parallel.cp
    rows = parallel.tp if parallel.sp else 1
    gathered = 1 if kernels.keep_gathered else rows
    hidden = model.hidden * width * (1 / rows + 1 / gathered)  # what the norm reads, and what it feeds the head
    return tokens * (hidden + 2 * width * -(-model.vocab // parallel.tp))


def buffers(model: Model, parallel: Parallel, train: Train, profile: Profile) -> float:
    """Bytes beside the model: the device's context and communicators, gathered sequences, received hidden states, and
    what ZeRO holds whole for a while."""
    width = WIDTH[train.precision]
    hidden = parallel.micro_batch_size * train.seq_len / parallel.cp * model.hidden * width
    result = float(profile.context_bytes)
    if parallel.tp > 1:
        result += 2 * hidden  # one gathered input and one partial sum
    if parallel.pp > 1:
        result += 2 * hidden / (parallel.tp if parallel.sp else 1)
    return result + passing(model, parallel, train)


def passing(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes of what ZeRO holds whole for a while.

    ZeRO-2: gradients of the bucket that fills and of two under way. ZeRO-3: weights of a block and of the next one on
    its way, of embedding and head, and all of them under pipeline parallelism; a block's gradients and their copy that
    is being summed.
    """
    if parallel.zero < 2:
        return 0.0
    weight, gradient = WIDTH[train.precision], WIDTH[train.grad_dtype]
    if parallel.zero == 2:
        return min(3 * parallel.bucket_bytes, 2 * _whole(model, parallel) * gradient)
    kinds = [layer_params(model, layer) for layer in samples_of_kinds(model) if layer is not None]
    tp, ep = parallel.tp, parallel.ep
    block = max((one.attention + one.ffn) / tp + one.replicated + one.experts / (tp * ep) for one in kinds)
    tables = model.vocab * model.hidden / tp * (1 if model.tied_embeddings else 2)
    gathered = _whole(model, parallel) if parallel.pp > 1 else 2 * block + tables
    return gathered * weight + 2 * block * gradient


def _whole(model: Model, parallel: Parallel) -> float:
    """Parameters of an average rank before data parallelism shards them."""
    return parameter_count(model) / (parallel.tp * parallel.pp)


def accounts(cluster: Cluster, model: Model, parallel: Parallel, train: Train) -> list[Memory]:
    """One account a pipeline rank, whose number is in `worst_rank` (the caller turns it into a rank)."""
    beside = buffers(model, parallel, train, profile_for(cluster.gpu.name, cluster.device))
    result = []
    ranks = zip(rank_parameters(model, parallel), activations(model, parallel, train), strict=True)
    for pp_rank, (parameters, kept) in enumerate(ranks):
        states = model_states(*parameters, parallel, train)
        parts = {
            **{"params": states.params, "grads": states.grads, "optimizer": states.optimizer},
            **{"activations": kept, "buffers": beside},
        }
        parts = {name: round(size) for name, size in parts.items()}
        total, capacity = sum(parts.values()), cluster.gpu.memory_bytes
        result.append(Memory(**parts, total=total, capacity=capacity, worst_rank=pp_rank))
    return result
