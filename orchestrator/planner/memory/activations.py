"""Bytes kept for backward, tensor by tensor, as the trainer's autograd keeps them; and the logits around the loss.

With every option of the paper switched on a layer's sum is that of Korthikanti et al. (arXiv 2205.05198, equations 1 to
4), which tests check; with the trainer's own, what its storages are measured to hold (docs/accuracy.md).
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.document import Cluster, Model, Parallel, Train
from orchestrator.planner.cost.pipeline import in_flight
from orchestrator.planner.cost.traffic import WIDTH
from orchestrator.planner.model.layers import is_moe_layer, layer_groups, samples_of_kinds
from orchestrator.planner.model.stages import rank_stages, splits, stage_range

from .deferred_weight_gradients import Waits

LOSS_CHUNK = 1 << 24  # logits that the loss has in fp32 at a time


class Kernels(Struct, frozen=True, kw_only=True):
    """Which tensors the implementation keeps for backward."""

    fused_attention: bool = True  # scores are recomputed in the kernel: only its softmax statistics stay
    fused_norm: bool = True  # RMSNorm keeps its input alone; else input and normalised input, both in fp32
    fused_activation: bool = False  # the gated activation keeps its two inputs only
    keep_gathered: bool = False  # with SP, matmul inputs are kept whole instead of gathered again in backward
    selective_core: bool = False  # selective recomputation leaves out attention scores, and nothing else
    keep_sent: bool = True  # a stage's output stays until its gradient is back, and what comes waits for its turn


def kernels_of(cluster: Cluster, model: Model, parallel: Parallel) -> Kernels:
    """The trainer's. Masks of dropout are not in a fused kernel; context parallelism makes its blocks again anyway."""
    return Kernels(
        fused_norm=cluster.device == "cuda",
        fused_attention=_fused(model, parallel),
        keep_gathered=parallel.sp and splits(parallel),  # a weight's gradient that waits needs its input whole
    )


def _fused(model: Model, parallel: Parallel) -> bool:
    return not model.dropout or parallel.cp > 1


def layer_activations(
    model: Model, layer: int, tokens: float, parallel: Parallel, train: Train, kernels: Kernels
) -> dict[str, float]:
    """Bytes that one layer keeps for backward, by tensor. tokens: of one micro-batch on this rank (b * s / cp)."""
    width, tp = WIDTH[train.precision], parallel.tp
    rows = tp if parallel.sp else 1  # what is cut along the sequence between the blocks
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
    """Bytes a token of one normalisation: its input and statistics."""
    if model.norm == "layer" or kernels.fused_norm:
        return model.hidden * width
    return model.hidden * 8


def _attention(model: Model, parallel: Parallel, train: Train, kernels: Kernels, width: int) -> dict[str, float]:
    """Bytes a token of queries, keys, values, attention output and what the softmax keeps."""
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
        out *= 2  # of the sequence that a rank attends to, and of the part that it holds
    kept = {"attention": elements * width, "attention output": out * width}
    if kernels.fused_attention:
        kept["softmax statistics"] = 4 * heads
    elif train.recompute == "none" or not kernels.selective_core:
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


class Kept(Struct, frozen=True):
    """Bytes of one layer and micro-batch with a recompute mode."""

    held: float  # from its forward to its backward
    live: float  # more, while it runs again


def layer_kept(
    model: Model, layer: int, tokens: float, parallel: Parallel, train: Train, kernels: Kernels, mode: str
) -> Kept:
    """Selective: a block's two inputs, matrix products but the last of each half, and attention where one kernel makes
    it; the rest is made again. Full: the input alone. What runs again holds the sequence whole."""
    tensors = layer_activations(model, layer, tokens, parallel, train, kernels)
    everything, boundary = sum(tensors.values()), boundary_bytes(model, parallel, train)
    if mode == "none":
        return Kept(everything, 0.0)
    if kernels.selective_core and mode == "selective":
        return Kept(everything, 0.0)
    rows = parallel.tp if parallel.sp and not kernels.keep_gathered else 1
    everything += tensors["matmul inputs"] * (rows - 1)
    if mode == "full":
        return Kept(boundary, everything - boundary)
    held = everything - tensors["matmul inputs"] * rows - tensors["mlp"] / 2 - tensors["norm inputs"] + 2 * boundary
    held -= tensors.get("attention scores", 0.0)
    if parallel.cp > 1 or not kernels.fused_attention:
        held -= tensors["attention output"] + tensors.get("softmax statistics", 0.0)
    return Kept(held, everything - held)


def boundary_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """The hidden states of one micro-batch between two blocks, or two stages, on one rank."""
    rows = parallel.tp if parallel.sp else 1
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    return model.hidden * WIDTH[train.precision] / rows * tokens


def activations(model: Model, parallel: Parallel, train: Train, kernels: Kernels | None = None) -> list[float]:
    """Bytes kept for backward at the peak of each pipeline rank, logits included."""
    kernels = kernels or Kernels(fused_attention=_fused(model, parallel))
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    kinds, modes = samples_of_kinds(model), ("none", "selective", "full")
    kept = [
        {mode: layer_kept(model, kind, tokens, parallel, train, kernels, mode) for mode in modes}
        for kind in kinds
        if kind is not None
    ]
    at = [0, len(kept) - 1]  # of a dense layer and of a mixture
    last, head = len(parallel.stage_layers) - 1, head_bytes(model, parallel, train, kernels)
    stage, result = stage_bytes(model, parallel, train, kernels), []
    waits = Waits(model, parallel, train) if splits(parallel) else None
    for rank, (stages, flying) in enumerate(zip(rank_stages(parallel), in_flight(parallel), strict=True)):
        ranges = [stage_range(parallel, place) for place in stages]
        groups = [group for group in layer_groups(model, train, ranges) if group[2]]
        held = sum(n * kept[at[kind]][mode].held for kind, mode, n in groups)
        held += sum(stage[index == last] for index in stages)
        live = [kept[at[kind]][mode].live for kind, mode, _ in groups]
        ends = last in stages
        if waits:
            layers = [(n, kind, more) for (kind, _, n), more in zip(groups, live, strict=True)]
            result.append(waits.peak(rank, flying, held / len(stages), len(stages), layers, head if ends else None))
            continue
        heads = head * heads_at_once(parallel.schedule, parallel.micro_batches) if ends else 0.0
        most = max(*live, head * ends, 0.0) + max(0.0, heads - head)
        result.append(held / len(stages) * flying + most)
    return [size + received_bytes(model, parallel, train, kernels) for size in result]


def heads_at_once(schedule: str, micro_batches: int) -> int:
    """Micro-batches whose logits the last stage holds: all, where no backward begins before the last forward."""
    return micro_batches if schedule == "afab" else 1


def received_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> float:
    """Of a pipeline rank: a hidden state and a gradient that have come and wait for their turn."""
    return 2 * boundary_bytes(model, parallel, train) if parallel.pp > 1 and kernels.keep_sent else 0.0


def stage_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> tuple[float, float]:
    """(a stage, the last stage): bytes of one micro-batch beside its layers. Rotary tables, and what was sent on."""
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    tables = 4 * model.head_dim * tokens if model.position == "rope" else 0.0
    return tables + boundary_bytes(model, parallel, train) * kernels.keep_sent, tables


def head_bytes(model: Model, parallel: Parallel, train: Train, kernels: Kernels) -> float:
    """Bytes that the last stage keeps besides its layers: around the final norm, and the logits."""
    width, tokens = WIDTH[train.precision], parallel.micro_batch_size * train.seq_len / parallel.cp
    rows = parallel.tp if parallel.sp else 1
    gathered = 1 if kernels.keep_gathered else rows
    hidden = _norm(model, width, kernels) / rows + model.hidden * width / gathered  # norm's input, and the head's
    return tokens * (hidden + width * -(-model.vocab // parallel.tp))


def loss_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes that come and go around the loss: fp32 logits of a chunk; in backward the logits' gradient beside them."""
    logits = parallel.micro_batch_size * train.seq_len / parallel.cp * -(-model.vocab // parallel.tp)
    width, chunk = WIDTH[train.precision], 4 * min(LOSS_CHUNK, logits)
    most = max(chunk * 2, width * logits + chunk) if width < 4 else max(chunk, width * logits)
    return max(0.0, most - width * logits) if splits(parallel) else most  # there it is kept: `Waits`
