"""Activation bytes, tensor by tensor, as the trainer's autograd keeps them for backward; and the logits at the loss.

With the paper's `Kernels` a layer's sum is that of Korthikanti et al. (arXiv 2205.05198, equations 1 to 4), which tests
check; with the trainer's, it is what its storages were measured to hold (docs/accuracy.md).
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.document import Cluster, Model, Parallel, Train
from orchestrator.planner.cost.pipeline import in_flight
from orchestrator.planner.model.layers import DTYPE_BYTES, layer_groups, layer_moe, sample_layers
from orchestrator.planner.model.stages import rank_stages, splits_backward, stage_range

from .deferred_weight_gradients import DeferredGradients

LOSS_CHUNK = 1 << 24  # logits that the loss converts to fp32 at a time


class Kernels(Struct, frozen=True, kw_only=True):
    """Which tensors the implementation keeps for backward."""

    fused_attention: bool = True  # keeps softmax statistics instead of scores
    fused_norm: bool = True  # RMSNorm keeps its input; else input and normalised input in fp32
    fused_activation: bool = False  # the gated activation keeps only its two inputs
    keep_gathered: bool = False  # with SP, keep gathered matmul inputs, not gather again
    selective_core: bool = False  # selective recomputation drops attention scores only
    keep_sent: bool = True  # keep a stage's output until its gradient arrives, and queued inputs


def kernels_of(cluster: Cluster, model: Model, parallel: Parallel) -> Kernels:
    """The trainer's kernels. Attention with dropout is not fused, except that context parallelism recomputes blocks."""
    return Kernels(
        fused_norm=cluster.device == "cuda",
        fused_attention=_fused(model, parallel),
        keep_gathered=parallel.sp and splits_backward(parallel),  # a deferred weight gradient needs the whole input
    )


def _fused(model: Model, parallel: Parallel) -> bool:
    return not model.dropout or parallel.cp > 1


def layer_activations(
    model: Model, layer: int, tokens: float, parallel: Parallel, train: Train, kernels: Kernels
) -> dict[str, float]:
    """Bytes that one layer keeps for backward, by tensor. tokens: of one micro-batch on this rank, b * s / cp."""
    width, tp = DTYPE_BYTES[train.precision], parallel.tp
    rows = tp if parallel.sp else 1  # shards of the sequence between the blocks
    gathered = 1 if kernels.keep_gathered else rows
    kept = {
        "norm inputs": 2 * _norm(model, width, kernels) / rows,
        "matmul inputs": 2 * model.hidden * width / gathered,
        **_attention(model, parallel, train, kernels, width),
        **_mlp(model, layer, parallel, kernels, width, gathered),
    }
    if model.dropout:
        kept["dropout masks"] = 2 * model.hidden / rows
    return {name: size * tokens for name, size in kept.items()}


def _norm(model: Model, width: int, kernels: Kernels) -> float:
    """Bytes per token of one normalisation."""
    if model.norm == "layer" or kernels.fused_norm:
        return model.hidden * width
    return model.hidden * 8


def _attention(model: Model, parallel: Parallel, train: Train, kernels: Kernels, width: int) -> dict[str, float]:
    """Bytes per token of queries, keys, values, attention output and softmax."""
    tp = parallel.tp
    heads, kv_heads = model.heads / tp, max(1.0, model.kv_heads / tp)
    if model.mla is not None:
        m = model.mla
        key = m.qk_nope_head_dim + m.qk_rope_head_dim
        elements = heads * (2 * key + m.v_head_dim) + m.q_lora_rank * 2 + m.kv_lora_rank * 2
        out = heads * m.v_head_dim
    else:
        elements, out = (heads + 2 * kv_heads) * model.head_dim, heads * model.head_dim
    if parallel.cp > 1 and parallel.cp_method == "ulysses":
        out *= 2  # before and after the all-to-all
    kept = {"attention": elements * width, "attention output": out * width}
    if kernels.fused_attention:
        kept["softmax statistics"] = 4 * heads
    elif train.recompute == "none" or not kernels.selective_core:
        # softmax output and the dropped-out copy that multiplies the values; with dropout a mask of one byte
        kept["attention scores"] = heads * train.seq_len * (2 * width + (1 if model.dropout else 0))
    return kept


def _mlp(model: Model, layer: int, parallel: Parallel, kernels: Kernels, width: int, gathered: int) -> dict[str, float]:
    """Bytes per token: inputs and output of the activation, input of the down projection, routed tokens."""
    copies = 2 if model.mlp == "plain" else (3 if kernels.fused_activation else 4)
    if (moe := layer_moe(model, layer)) is None:
        return {"mlp": copies * model.ffn_hidden * width / parallel.tp}
    ffn = moe.top_k * moe.ffn_hidden + moe.shared_ffn_hidden
    routed = 2 * moe.top_k * model.hidden / gathered  # inputs and outputs of the experts
    return {"mlp": copies * ffn * width / parallel.tp, "routed tokens": routed * width, "router": 8 * moe.experts}


class ActivationBytes(Struct, frozen=True):
    """Bytes of one layer and micro-batch."""

    stored: float  # from its forward to its backward
    recomputing: float  # further bytes while the layer is recomputed


def layer_activation_bytes(
    model: Model, layer: int, tokens: float, parallel: Parallel, train: Train, kernels: Kernels, mode: str
) -> ActivationBytes:
    """Activation bytes of a layer with a recomputation mode.

    Selective keeps both inputs of the layer's halves, all matrix products but the last of each half, and fused
    attention. Full keeps the layer's input. A recomputed layer holds the gathered sequence.
    """
    tensors = layer_activations(model, layer, tokens, parallel, train, kernels)
    everything, boundary = sum(tensors.values()), boundary_bytes(model, parallel, train)
    if mode == "none":
        return ActivationBytes(everything, 0.0)
    if kernels.selective_core and mode == "selective":
        return ActivationBytes(everything, 0.0)
    rows = parallel.tp if parallel.sp and not kernels.keep_gathered else 1
    everything += tensors["matmul inputs"] * (rows - 1)
    if mode == "full":
        return ActivationBytes(boundary, everything - boundary)
    stored = everything - tensors["matmul inputs"] * rows - tensors["mlp"] / 2 - tensors["norm inputs"] + 2 * boundary
    stored -= tensors.get("attention scores", 0.0)
    if parallel.cp > 1 or not kernels.fused_attention:
        stored -= tensors["attention output"] + tensors.get("softmax statistics", 0.0)
    return ActivationBytes(stored, everything - stored)


def boundary_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes of one micro-batch's hidden states between two layers, or two stages, on one rank."""
    rows = parallel.tp if parallel.sp else 1
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    return model.hidden * DTYPE_BYTES[train.precision] / rows * tokens


def activations(model: Model, parallel: Parallel, train: Train, kernels: Kernels | None = None) -> list[float]:
    """Peak activation bytes of each pipeline rank, logits included."""
    kernels = kernels or Kernels(fused_attention=_fused(model, parallel))
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    kinds, modes = sample_layers(model), ("none", "selective", "full")
    kept = [
        {mode: layer_activation_bytes(model, kind, tokens, parallel, train, kernels, mode) for mode in modes}
        for kind in kinds
        if kind is not None
    ]
    at = [0, len(kept) - 1]  # index of a dense layer and of an MoE layer
    last, head = len(parallel.stage_layers) - 1, head_bytes(model, parallel, train, kernels)
    stage, result = stage_bytes(model, parallel, train, kernels), []
    deferred = DeferredGradients(model, parallel, train) if splits_backward(parallel) else None
    for rank, (stages, in_flight_count) in enumerate(zip(rank_stages(parallel), in_flight(parallel), strict=True)):
        ranges = [stage_range(parallel, place) for place in stages]
        groups = [group for group in layer_groups(model, train, ranges) if group[2]]
        stored = sum(n * kept[at[kind]][mode].stored for kind, mode, n in groups)
        stored += sum(stage[index == last] for index in stages)
        recomputing = [kept[at[kind]][mode].recomputing for kind, mode, _ in groups]
        ends = last in stages
        if deferred:
            layers = [(n, kind, more) for (kind, _, n), more in zip(groups, recomputing, strict=True)]
            result.append(
                deferred.peak(rank, in_flight_count, stored / len(stages), len(stages), layers, head if ends else None)
            )
            continue
        heads = head * logits_in_flight(parallel.schedule, parallel.micro_batches) if ends else 0.0
        extra = max(*recomputing, head * ends, 0.0) + max(0.0, heads - head)
        result.append(stored / len(stages) * in_flight_count + extra)
    return [size + received_bytes(model, parallel, train, kernels) for size in result]


def logits_in_flight(schedule: str, micro_batches: int) -> int:
    """Micro-batches whose logits the last stage holds: all where forwards precede all backwards."""
    return micro_batches if schedule == "afab" else 1


def received_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> float:
    """Bytes of a hidden state and a gradient that a pipeline rank has received and not used yet."""
    return 2 * boundary_bytes(model, parallel, train) if parallel.pp > 1 and kernels.keep_sent else 0.0


def stage_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> tuple[float, float]:
    """Bytes of one micro-batch outside its layers, in (an inner stage, the last stage): rotary tables, sent output."""
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    tables = 4 * model.head_dim * tokens if model.position == "rope" else 0.0
    return tables + boundary_bytes(model, parallel, train) * kernels.keep_sent, tables


def head_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> float:
    """Bytes that the last stage keeps outside its layers: final norm, input of the output projection, logits."""
    width, tokens = DTYPE_BYTES[train.precision], parallel.micro_batch_size * train.seq_len / parallel.cp
    rows = parallel.tp if parallel.sp else 1
    gathered = 1 if kernels.keep_gathered else rows
    hidden = (
        _norm(model, width, kernels) / rows + model.hidden * width / gathered
    )  # inputs of norm and output projection
    return tokens * (hidden + width * -(-model.vocab // parallel.tp))


def loss_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """Temporary bytes of the loss: fp32 logits of a chunk, and in backward the logits' gradient."""
    logits = parallel.micro_batch_size * train.seq_len / parallel.cp * -(-model.vocab // parallel.tp)
    width, chunk = DTYPE_BYTES[train.precision], 4 * min(LOSS_CHUNK, logits)
    most = max(chunk * 2, width * logits + chunk) if width < 4 else max(chunk, width * logits)
    # a split backward keeps the gradient: `DeferredGradients` counts it
    return max(0.0, most - width * logits) if splits_backward(parallel) else most
