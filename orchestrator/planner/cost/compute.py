"""Roofline: seconds that one GPU computes, by operator group, for one micro-batch of one pipeline stage.

Each group takes the longer of its FLOPs at the reachable rate and its bytes at the reachable memory bandwidth
(Williams et al. 2009), plus a launch per kernel. Communication is not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster, Model, Parallel, Train
from orchestrator.planner.model.layers import (
    DTYPE_BYTES,
    LayerFlops,
    dense_and_moe,
    head_flops,
    layer_flops,
    layer_groups,
    layer_moe,
    layer_params,
    sample_layers,
)

from .profile import Profile
from .traffic import Overlap

KERNELS_PER_LAYER = 14  # forward: 4 to 7 matmuls, attention, 2 norms, rotary, activation, 2 residual sums
KERNELS_RECOMPUTED = 5  # of them in selective recomputation: 2 norms, rotary of queries and keys, activation


class Rates(Struct, frozen=True):
    """Rates that one GPU reaches: FLOP/s of matmuls and attention core, bytes/s of memory, seconds per launch."""

    matmul: float
    attention: float
    memory: float
    launch_s: float
    peak: float  # data-sheet FLOP/s of this precision, the reference of MFU


def rates(cluster: Cluster, profile: Profile, precision: str) -> Rates:
    """Rates of the cluster's GPU in `precision`. Raises OrchError (65) when it does not compute in that precision."""
    peak = cluster.gpu.peak_flops.get(precision)
    if peak is None:
        known = ", ".join(cluster.gpu.peak_flops)
        raise OrchError(f"train.precision {precision}: GPU {cluster.gpu.name} computes in {known}", Exit.CONFIG)
    return Rates(
        matmul=peak * profile.gemm.get(precision, profile.gemm_default),
        attention=peak * profile.attention,
        memory=cluster.gpu.hbm_bytes_per_s * profile.hbm,
        launch_s=profile.kernel_launch_s,
        peak=peak,
    )


class StageSeconds(Struct, frozen=True):
    """Seconds of one micro-batch on one virtual stage."""

    forward: float
    backward: float  # recomputation included
    attention_core: float  # of one forward; ring attention's communication hides behind it

    @property
    def both(self) -> float:
        return self.forward + self.backward


class LayerSeconds(NamedTuple):
    """Seconds of one micro-batch's forward through one decoder layer on one GPU, and of parts of it."""

    forward: float
    core: float  # attention scores and weighted values
    selective: float  # what selective recomputation computes recompute_s in backward
    column_matmuls: tuple[float, float]  # column-parallel matrix products of attention, of the feed-forward


def layer_seconds(model: Model, layer: int, parallel: Parallel, train: Train, rate: Rates) -> LayerSeconds:
    """Forward seconds of decoder layer `layer`.

    Selective recomputation keeps matrix products and attention; it computes norms, rotary positions and the activation
    recompute_s (`trainer/parallel/recompute.py`), and under context parallelism attention too.
    """
    width, tp = DTYPE_BYTES[train.precision], parallel.tp
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    flops = layer_flops(model, layer, train.seq_len)
    params = layer_params(model, layer)
    moe = layer_moe(model, layer)
    experts = params.experts / parallel.ep if moe else 0
    weight_bytes = (params.attention + params.ffn + experts) / tp * width
    matmul = max((flops.attention_gemm + flops.ffn_gemm) * tokens / tp / rate.matmul, weight_bytes / rate.memory)
    core = flops.attention_core * tokens / tp / rate.attention * _slowest_core(model, parallel)
    # read and write: two norms and two residual sums over hidden; rotary over queries and keys; the activation
    ffn = moe.top_k * moe.ffn_hidden + moe.shared_ffn_hidden if moe else model.ffn_hidden
    row = model.hidden / (tp if parallel.sp else 1)
    columns = ((3 if model.mlp == "gated" else 2) * ffn + 2 * (model.heads + model.kv_heads) * model.head_dim) / tp
    moved = width * tokens / rate.memory
    elementwise = (10 * row + columns) * moved + KERNELS_PER_LAYER * rate.launch_s
    selective = (4 * row + columns) * moved + KERNELS_RECOMPUTED * rate.launch_s
    column_matmuls = _column_matmuls(model, flops, tokens / tp / rate.matmul)
    return LayerSeconds(
        matmul + core + elementwise, core, selective + (core if parallel.cp > 1 else 0.0), column_matmuls
    )


def _slowest_core(model: Model, parallel: Parallel) -> float:
    """Attention FLOPs of the busiest context-parallel rank over the mean.

    With contiguous parts the rank of the last part attends to all tokens before it; with parts from both ends of the
    sequence (zig-zag) all ranks do the same work.
    """
    return 2 - 1 / parallel.cp if model.causal and parallel.cp_method == "ring" else 1.0


def _column_matmuls(model: Model, flops: LayerFlops, seconds_per_flop: float) -> tuple[float, float]:
    """Seconds of the column-parallel matrices: queries, keys and values in attention; gate and up in the MLP."""
    attention = (model.heads + 2 * model.kv_heads) / (2 * (model.heads + model.kv_heads))
    mlp = 2 / 3 if model.mlp == "gated" else 1 / 2
    return attention * flops.attention_gemm * seconds_per_flop, mlp * flops.ffn_gemm * seconds_per_flop


NO_LAYER = LayerSeconds(0.0, 0.0, 0.0, (0.0, 0.0))


def layer_seconds_by_kind(model: Model, parallel: Parallel, train: Train, rate: Rates) -> list[LayerSeconds]:
    """Forward seconds of a dense and of an MoE layer, in the order of `sample_layers`."""
    return [
        NO_LAYER if layer is None else layer_seconds(model, layer, parallel, train, rate)
        for layer in sample_layers(model)
    ]


def stage_seconds(
    model: Model, parallel: Parallel, train: Train, rate: Rates, kinds: Sequence[LayerSeconds]
) -> list[StageSeconds]:
    """Compute seconds of every virtual stage. Backward is twice forward (Narayanan et al. 2021) plus recomputation."""
    result, start, (dense, moe) = [], 0, kinds
    for stage, count in enumerate(parallel.stage_layers):
        few, many = dense_and_moe(model, start, start + count)
        forward, core = few * dense.forward + many * moe.forward, few * dense.core + many * moe.core
        selective = few * dense.selective + many * moe.selective
        start += count
        recompute_s = {"none": 0.0, "selective": selective, "full": forward}.get(train.recompute)
        if recompute_s is None:  # budget: mode by mode
            recompute_s = sum(
                n * {"none": 0.0, "selective": kinds[kind].selective, "full": kinds[kind].forward}[mode]
                for kind, mode, n in layer_groups(model, train, [range(start - count, start)])
            )
        if stage == len(parallel.stage_layers) - 1:
            forward += loss_seconds(model, parallel, train, rate)
        result.append(StageSeconds(forward, 2 * forward + recompute_s, core))
    return result


def overlap_seconds(
    model: Model, parallel: Parallel, train: Train, rate: Rates, kinds: Sequence[LayerSeconds]
) -> dict[Overlap, float]:
    """Seconds of the matrix products that communication overlaps with; of two kinds of layers the shorter one."""
    attention, mlp = map(min, zip(*(kind.column_matmuls for kind in kinds if kind is not NO_LAYER), strict=True))
    return {"": 0.0, "attention": attention, "mlp": mlp, "head": _head_seconds(model, parallel, train, rate)}


def _head_seconds(model: Model, parallel: Parallel, train: Train, rate: Rates) -> float:
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    return head_flops(model) * tokens / parallel.tp / rate.matmul


def loss_seconds(model: Model, parallel: Parallel, train: Train, rate: Rates) -> float:
    """Forward seconds of output projection and loss for one micro-batch."""
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    logits = tokens * model.vocab / parallel.tp
    loss = logits * (DTYPE_BYTES[train.precision] + 8) / rate.memory  # cast to fp32, soft-max, in place
    return _head_seconds(model, parallel, train, rate) + loss


def optimizer_seconds(parameters: float, shards: int, rate: Rates) -> float:
    """Seconds of AdamW on `parameters / shards` parameters, bound by memory bandwidth.

    It reads gradient, master weight and both moments, and writes the last three and the weight: 30 bytes a parameter.
    """
    return parameters / shards * 30 / rate.memory + 2 * rate.launch_s
