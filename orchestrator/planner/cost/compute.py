"""Roofline: seconds that one GPU computes, by operator group, for one micro-batch of one pipeline stage.

Each group takes the longer of its FLOPs at the reachable rate and its bytes at the reachable memory bandwidth
(Williams et al. 2009), plus a launch a kernel. Communication is not in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster, Model, Parallel, Train
from orchestrator.planner.model.layers import (
    LayerFlops,
    dense_and_moe,
    head_flops,
    is_moe_layer,
    layer_flops,
    layer_groups,
    layer_params,
    samples_of_kinds,
)

from .profile import Profile
from .traffic import WIDTH, Beside

KERNELS_A_LAYER = 14  # forward: 4 to 7 matmuls, attention, 2 norms, rotary, activation, 2 residual sums
KERNELS_AGAIN = 5  # of them in selective recomputation: 2 norms, rotary of queries and keys, activation


class Rates(Struct, frozen=True):
    """What one GPU reaches: FLOP/s of matmuls and of the attention core, bytes/s of memory, seconds a launch."""

    matmul: float
    attention: float
    memory: float
    launch_s: float
    peak: float  # data-sheet FLOP/s of this precision: what MFU is measured against


def rates(cluster: Cluster, profile: Profile, precision: str) -> Rates:
    """Raises OrchError (65) when the GPU does not compute in `precision`."""
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
    """One micro-batch on one virtual stage."""

    forward: float
    backward: float  # with whatever recompute repeats
    attention_core: float  # of one forward: what ring attention hides behind

    @property
    def both(self) -> float:
        return self.forward + self.backward


class LayerSeconds(NamedTuple):
    """One micro-batch through one decoder layer on one GPU."""

    forward: float
    core: float  # of it, attention scores and weighted values
    selective: float  # of it, what selective recomputation repeats in backward
    columns: tuple[
        float, float
    ]  # of it, matrix products whose input is communicated: in attention, in the feed-forward


def layer_seconds(model: Model, layer: int, parallel: Parallel, train: Train, rate: Rates) -> LayerSeconds:
    """Selective recomputation keeps matrix products and attention and repeats norms, rotary positions and the
    activation (`trainer/parallel/recompute.py`); under context parallelism it keeps no attention either.
    """
    width, tp = WIDTH[train.precision], parallel.tp
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    flops = layer_flops(model, layer, train.seq_len)
    params = layer_params(model, layer)
    experts = params.experts / parallel.ep if is_moe_layer(model, layer) else 0
    weight_bytes = (params.attention + params.ffn + experts) / tp * width
    matmul = max((flops.attention_gemm + flops.ffn_gemm) * tokens / tp / rate.matmul, weight_bytes / rate.memory)
    core = flops.attention_core * tokens / tp / rate.attention * _slowest_core(model, parallel)
    # read and write: two norms and two residual sums over hidden; rotary over queries and keys; the activation
    ffn = model.moe.top_k * model.moe.ffn_hidden + model.moe.shared_ffn_hidden if experts else model.ffn_hidden
    row = model.hidden / (tp if parallel.sp else 1)
    columns = ((3 if model.mlp == "gated" else 2) * ffn + 2 * (model.heads + model.kv_heads) * model.head_dim) / tp
    moved = width * tokens / rate.memory
    elementwise = (10 * row + columns) * moved + KERNELS_A_LAYER * rate.launch_s
    selective = (4 * row + columns) * moved + KERNELS_AGAIN * rate.launch_s
    columns = _columns(model, flops, tokens / tp / rate.matmul)
    return LayerSeconds(matmul + core + elementwise, core, selective + (core if parallel.cp > 1 else 0.0), columns)


def _slowest_core(model: Model, parallel: Parallel) -> float:
    """Of the rank with most attention, over the mean: a contiguous last part of the sequence sees all that came before,
    while parts from both ends of it (zig-zag) see the same on every rank.
    """
    return 2 - 1 / parallel.cp if model.causal and parallel.cp_method == "ring" else 1.0


def _columns(model: Model, flops: LayerFlops, seconds_per_flop: float) -> tuple[float, float]:
    """Queries, keys and values of all that attention multiplies with; gate and up, of gate, up and down."""
    attention = (model.heads + 2 * model.kv_heads) / (2 * (model.heads + model.kv_heads))
    mlp = 2 / 3 if model.mlp == "gated" else 1 / 2
    return attention * flops.attention_gemm * seconds_per_flop, mlp * flops.ffn_gemm * seconds_per_flop


NO_LAYER = LayerSeconds(0.0, 0.0, 0.0, (0.0, 0.0))


def kinds_seconds(model: Model, parallel: Parallel, train: Train, rate: Rates) -> list[LayerSeconds]:
    """Of a layer of each kind, as `samples_of_kinds`."""
    return [
        NO_LAYER if layer is None else layer_seconds(model, layer, parallel, train, rate)
        for layer in samples_of_kinds(model)
    ]


def stage_seconds(
    model: Model, parallel: Parallel, train: Train, rate: Rates, kinds: Sequence[LayerSeconds]
) -> list[StageSeconds]:
    """Compute time of every virtual stage. Backward is twice forward (Narayanan et al. 2021) plus recompute."""
    result, start, (dense, moe) = [], 0, kinds
    for stage, count in enumerate(parallel.stage_layers):
        few, many = dense_and_moe(model, start, start + count)
        forward, core = few * dense.forward + many * moe.forward, few * dense.core + many * moe.core
        selective = few * dense.selective + many * moe.selective
        start += count
        again = {"none": 0.0, "selective": selective, "full": forward}.get(train.recompute)
        if again is None:  # budget: mode by mode
            again = sum(
                n * {"none": 0.0, "selective": kinds[kind].selective, "full": kinds[kind].forward}[mode]
                for kind, mode, n in layer_groups(model, train, [range(start - count, start)])
            )
        if stage == len(parallel.stage_layers) - 1:
            forward += loss_seconds(model, parallel, train, rate)
        result.append(StageSeconds(forward, 2 * forward + again, core))
    return result


def beside_seconds(
    model: Model, parallel: Parallel, train: Train, rate: Rates, kinds: Sequence[LayerSeconds]
) -> dict[Beside, float]:
    """Seconds of the matrix products that communication runs beside; of two kinds of layers the shorter one."""
    attention, mlp = map(min, zip(*(kind.columns for kind in kinds if kind is not NO_LAYER), strict=True))
    return {"": 0.0, "attention": attention, "mlp": mlp, "head": _head_seconds(model, parallel, train, rate)}


def _head_seconds(model: Model, parallel: Parallel, train: Train, rate: Rates) -> float:
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    return head_flops(model) * tokens / parallel.tp / rate.matmul


def loss_seconds(model: Model, parallel: Parallel, train: Train, rate: Rates) -> float:
    """Output projection and loss, forward, of one micro-batch."""
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    logits = tokens * model.vocab / parallel.tp
    loss = logits * (WIDTH[train.precision] + 8) / rate.memory  # cast to fp32, soft-max, in place
    return _head_seconds(model, parallel, train, rate) + loss


def optimizer_seconds(parameters: float, shards: int, rate: Rates) -> float:
    """AdamW is memory-bound: reads gradient, master and both moments, writes the last three and the weight (30 B)."""
    return parameters / shards * 30 / rate.memory + 2 * rate.launch_s
