"""Seconds that one GPU computes, by term.

They are those of one micro-batch in one decoder layer, of the loss, and of the optimizer. Matrix
products follow an additive roofline: FLOPs at the rate of a large product plus bytes at that of
memory, which gives the efficiency curve of small shapes. Attention, memory-bound kernels and casts
to 8 bits are separate terms. If the CPU needs longer to launch a layer than the GPU to run it, the
layer takes the CPU's time: the fourth-power mean joins the two smoothly. Terms, constants and their
sources: `parameters`, accuracy.md section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from orchestrator.cost.dual import Number
from orchestrator.cost.model.layers import (
    dense_on_rank,
    layer_params,
    sample_layers,
)
from orchestrator.cost.rates import Rates
from orchestrator.cost.workload import Workload
from orchestrator.plan import flops
from orchestrator.plan.document import Model, Moe, Parallel
from orchestrator.plan.expert_capacity import taken_choices
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.layer import Operation, layer_moe, layer_operations
from orchestrator.plan.rounding.wide import wide_share

from .imbalance import imbalance

TERMS = ("gemm", "attention", "elementwise", "cast", "experts", "recompute", "head", "host")


class LayerSeconds(NamedTuple):
    """Seconds of one micro-batch through one layer on one GPU.

    Communication and recomputation are not included.
    """

    forward: Number
    backward: Number
    core: Number  # the part of forward for attention scores and weighted values
    selective: Number  # the work that selective recomputation repeats in backward
    full: Number  # the work that full recomputation repeats
    # Of attention and of the feed-forward: the column-parallel products, the row-parallel one.
    half_matmuls: tuple[tuple[Number, Number], tuple[Number, Number]]
    terms: dict[str, Number]  # forward and backward, by term

    def recompute_s(self, mode: str) -> Number:
        """Returns the seconds of recomputation in this mode."""
        return {"none": 0.0, "selective": self.selective, "full": self.full}[mode]


NO_LAYER = LayerSeconds(
    forward=0.0,
    backward=0.0,
    core=0.0,
    selective=0.0,
    full=0.0,
    half_matmuls=((0.0, 0.0), (0.0, 0.0)),
    terms={},
)


class Matrix(NamedTuple):
    """Products [rows, inputs] x [inputs, outputs] of one kind, in one layer on one rank."""

    rows: Number  # rows of all products together
    inputs: float
    outputs: float
    weights: float = 1.0  # number of such matrices
    wide: float = 0.0  # share of the layers of this kind in which they stay wide

    @property
    def flops(self) -> Number:
        """FLOPs of the forward products."""
        return 2.0 * self.rows * self.inputs * self.outputs

    @property
    def reduced(self) -> tuple[Number, Number]:
        """Lengths of the sums: of the product itself, and of both gradients together."""
        return self.inputs, self.outputs + self.rows

    @property
    def bytes(self) -> Number:
        """Bytes read and written in 16 bits."""
        return 2.0 * (
            self.rows * (self.inputs + self.outputs) + self.weights * self.inputs * self.outputs
        )

    def seconds(self, rate: Rates) -> Number:
        """Returns the seconds of the forward products."""
        seconds = self.flops * rate.gemm_s + self.bytes * rate.gemm_byte_s
        return seconds + self.more_seconds(rate) if self.wide else seconds

    def more_seconds(self, rate: Rates) -> Number:
        """Returns the seconds by which forward products last longer for those that stay wide."""
        return self.flops * self.wide * (rate.gemm16_s - rate.gemm_s)


def layer_matrices(
    workload: Workload,
    layer: int,
    load: Number = 1.0,
) -> tuple[list[Matrix], list[Matrix]]:
    """Returns the products of one micro-batch on one rank, without the router.

    The result is (products of attention, products of the MLP or the experts). `load` is the load of
    a rank that shares experts over the mean.
    """
    halves: dict[str, list[Matrix]] = {"attention": [], "mlp": []}
    products = [
        operation
        for operation in layer_operations(workload.model, layer)
        if operation.kind == "product"
    ]
    for _, fused in groupby(products, key=lambda operation: operation.fused or operation.name):
        group = list(fused)
        halves[group[0].half].append(_matrix(workload, layer, group, load))
    return halves["attention"], halves["mlp"]


def _matrix(
    workload: Workload,
    layer: int,
    fused: Sequence[Operation],
    load: Number,
) -> Matrix:
    """Returns the products of a rank that run as one, because they read the same inputs."""
    first = fused[0]
    rows: Number = workload.tokens
    ranks = workload.parallel.tp
    matrices = 1.0
    if first.routed:
        moe = layer_moe(workload.model, layer)
        assert moe is not None, "routed operations belong to a mixture of experts"
        mesh = expert_mesh(workload.parallel)
        ranks = mesh.etp
        matrices = first.matrices / mesh.ep
        choices = taken_choices(moe, workload.train.seq_len)
        rows = rows * choices * (mesh.etp / workload.parallel.tp) * load
    outputs = [operation.outputs_on_rank(ranks) for operation in fused]
    train = workload.train
    wide = sum(
        size * wide_share(train, workload.model, layer, operation.name)
        for operation, size in zip(fused, outputs, strict=True)
    )
    return Matrix(
        rows,
        first.inputs_on_rank(ranks),
        sum(outputs),
        matrices,
        wide=wide / sum(outputs),
    )


def layer_seconds(workload: Workload, layer: int, rate: Rates) -> LayerSeconds:
    """Returns the seconds of decoder layer `layer` (0-based)."""
    moe = layer_moe(workload.model, layer)
    load = imbalance(workload.parallel, rate)
    attention, mlp = layer_matrices(workload, layer, load)
    matrices = attention + mlp
    gemm = _gemm_seconds(workload, matrices, moe, rate)
    forward_wave, backward_wave = _wave_seconds(matrices, rate)
    core, core_back = _core(workload, rate)
    row, columns = _elementwise_features(workload, moe, load)
    elementwise = workload.tokens * (row + columns) * rate.elementwise * rate.byte_s
    cast = _cast_features(matrices) * rate.cast_bytes * rate.byte_s
    experts = _permutation_seconds(workload, moe, load, rate)
    accumulate = _accumulation_seconds(workload, layer, rate)

    forward = gemm + forward_wave + core + elementwise + cast + experts
    terms = {
        "gemm": gemm * (2.0 + rate.weight_gradients) + forward_wave + backward_wave + accumulate,
        "attention": core + core_back,
        "elementwise": 3.0 * elementwise,
        "cast": 3.0 * cast,
        "experts": 2.0 * experts,
    }
    gpu = sum(terms.values())
    slower = _slowed_by_host(gpu, moe, rate)
    terms["host"] = gpu * (slower - 1.0)
    return LayerSeconds(
        forward=forward * slower,
        backward=(gpu - forward) * slower,
        core=core,
        selective=_selective(
            workload,
            rate,
            attention,
            core=core,
            outside_rows=elementwise * _outside_rows(row, columns),
            forward=forward,
        ),
        full=forward * rate.full_recompute,
        half_matmuls=(_ends(attention, rate), _ends(mlp, rate)),
        terms=terms,
    )


def _ends(matrices: Sequence[Matrix], rate: Rates) -> tuple[Number, Number]:
    """Returns the seconds of the first and of the last products of a half of a layer."""
    return matrices[0].seconds(rate), matrices[-1].seconds(rate)


def _slowed_by_host(gpu: Number, moe: Moe | None, rate: Rates) -> Number:
    """Returns a layer's seconds with the CPU's launches over its `gpu` seconds alone.

    The CPU launches the kernels of forward and backward alike.
    """
    host = rate.host_moe_s if moe is not None else rate.host_dense_s
    slower = (gpu**4 + host**4) ** 0.25 / gpu
    return slower + rate.host_gap_s / gpu


def _gemm_seconds(
    workload: Workload,
    matrices: Sequence[Matrix],
    moe: Moe | None,
    rate: Rates,
) -> Number:
    """Returns the seconds of forward matrix products, with the router's."""
    gemm = (
        sum(matrix.flops for matrix in matrices) * rate.gemm_s
        + sum(matrix.bytes for matrix in matrices) * rate.gemm_byte_s
    )
    gemm += sum(matrix.more_seconds(rate) for matrix in matrices if matrix.wide)
    if moe is not None:
        router = 2.0 * workload.tokens / workload.sequence_shards * workload.model.hidden
        gemm += router * moe.experts * rate.gemm16_s
    return gemm


def _cast_features(matrices: Sequence[Matrix]) -> Number:
    """Returns the elements of the inputs of forward products that are rounded to fewer bits."""
    return sum(matrix.rows * matrix.inputs * (1 - matrix.wide) for matrix in matrices)


def _wave_seconds(matrices: Sequence[Matrix], rate: Rates) -> tuple[Number, Number]:
    """Returns the seconds that (forward, backward) lose in last, partly filled waves."""
    forward, backward = zip(*(matrix.reduced for matrix in matrices), strict=True)
    seconds = sum(forward) * rate.wave_s, sum(backward) * rate.wave_s
    wide = [matrix for matrix in matrices if matrix.wide]
    if not wide:
        return seconds
    slower = rate.wave_s * (rate.gemm16_s / rate.gemm_s - 1.0)
    more_forward, more_backward = (
        sum(matrix.reduced[index] * matrix.wide for matrix in wide) * slower for index in range(2)
    )
    return seconds[0] + more_forward, seconds[1] + more_backward


def _elementwise_features(
    workload: Workload,
    moe: Moe | None,
    load: Number,
) -> tuple[float, Number]:
    """Returns the features per token that memory-bound kernels move in forward.

    The result is (of hidden states, of heads and of the MLP).
    """
    model = workload.model
    tp = workload.parallel.tp
    ffn: Number = model.ffn_hidden
    if moe is not None:
        choices = taken_choices(moe, workload.train.seq_len)
        ffn = choices * moe.ffn_hidden * load + moe.shared_ffn_hidden
    gated = 6 if model.mlp == "gated" else 4
    columns: Number = gated * ffn / tp
    if model.position == "rope":
        columns += 4 * (model.heads + model.kv_heads) * model.head_dim / tp
    return 20 * model.hidden / workload.sequence_shards, columns


def _outside_rows(row: float, columns: Number) -> Number:
    """Returns the share of memory-bound work in norms, rotary positions and the activation."""
    share = columns / (row + columns)
    return share + 0.4 * (1 - share)


def _permutation_seconds(
    workload: Workload,
    moe: Moe | None,
    load: Number,
    rate: Rates,
) -> Number:
    """Returns the seconds of permuting routed tokens in forward."""
    if moe is None:
        return 0.0
    tokens = workload.tokens / workload.sequence_shards
    copies = tokens * taken_choices(moe, workload.train.seq_len)
    seconds = rate.permute * 8 * copies * workload.model.hidden * rate.byte_s
    # Half of these rows are the rank's own, half are received.
    return seconds * (1.0 + load) / 2


def _accumulation_seconds(workload: Workload, layer: int, rate: Rates) -> Number:
    """Returns the seconds in which a layer's weight gradients are added to their sums."""
    mesh = expert_mesh(workload.parallel)
    experts = layer_params(workload.model, layer).experts / (mesh.etp * mesh.ep)
    parameters = dense_on_rank(workload.model, layer, workload.parallel.tp) + experts
    return parameters * rate.accumulate_bytes * rate.byte_s * rate.weight_gradients


def _core(workload: Workload, rate: Rates) -> tuple[Number, Number]:
    """Returns the (forward, backward) seconds of attention scores and weighted values."""
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    tokens = workload.tokens
    core_flops = (
        flops.attention_core_flops(model, train.seq_len) / model.layers * tokens / parallel.tp
    )
    # Unfused attention computes the whole square.
    if not isinstance(rate.scores_bytes, float) or rate.scores_bytes:
        square = core_flops * (2 if model.causal else 1)
        if model.head_dim % 8:
            square = square * 8
        scores = tokens * train.seq_len * model.heads / parallel.tp
        forward = square * rate.attention_s + scores * rate.scores_bytes * rate.byte_s
        return forward, 2.0 * forward
    forward = core_flops * rate.attention_s * _slowest_core(model, parallel)
    if parallel.cp > 1:
        forward = forward * rate.cp_attention
    return forward, 2.5 * forward


def _slowest_core(model: Model, parallel: Parallel) -> float:
    """Returns the attention FLOPs of the busiest context-parallel rank over the mean.

    With contiguous parts, the rank of the last part attends to all tokens before it. With parts
    from both ends of the sequence (zig-zag), all ranks do the same work.
    """
    return 2 - 1 / parallel.cp if model.causal and parallel.cp_method == "ring" else 1.0


def _selective(
    workload: Workload,
    rate: Rates,
    attention: Sequence[Matrix],
    *,
    core: Number,
    outside_rows: Number,
    forward: Number,
) -> Number:
    """Returns the seconds that selective recomputation repeats.

    `outside_rows` is the seconds of norms, rotary positions and the activation.
    """
    software = workload.software
    if software.selective == "core":
        return core
    if software.selective == "ops":
        return forward * rate.recompute_ops
    if software.selective == "alternate":
        return forward * 0.5
    # With context parallelism, attention is recomputed too.
    seconds = outside_rows + (core if workload.parallel.cp > 1 else 0.0)
    if workload.model.mla is not None and workload.train.recompute_latents is True:
        _, *from_latents, _ = attention  # queries, keys and values made from latents
        seconds += sum(matrix.seconds(rate) for matrix in from_latents)
    return seconds


def layer_seconds_by_kind(workload: Workload, rate: Rates) -> tuple[LayerSeconds, LayerSeconds]:
    """Returns the seconds of a dense and of an MoE layer, in the order of `sample_layers`."""
    model = workload.model
    dense, moe = (
        NO_LAYER if layer is None else layer_seconds(workload, layer, rate)
        for layer in sample_layers(model)
    )
    return dense, moe


def overlap_seconds(
    workload: Workload,
    rate: Rates,
    kinds: Sequence[LayerSeconds],
) -> dict[str, Number]:
    """Returns the seconds of the matrix products that communication overlaps with.

    With two kinds of layers, the shorter product counts.
    """
    overlap_s: dict[str, Number] = {
        "": 0.0,
        "head": _head_seconds(workload, rate),
    }
    halves = [kind.half_matmuls for kind in kinds if kind is not NO_LAYER]
    for index, half in enumerate(("attention", "mlp")):
        overlap_s[half] = min(layer[index][0] for layer in halves)
        overlap_s[f"{half} end"] = min(layer[index][1] for layer in halves)
    return overlap_s


def _head_seconds(workload: Workload, rate: Rates) -> Number:
    """Returns the forward seconds of the output projection."""
    model = workload.model
    tokens = workload.tokens
    projection = 2.0 * model.hidden * model.vocab
    return projection * tokens / workload.parallel.tp * rate.gemm16_s * rate.head


def loss_seconds(workload: Workload, rate: Rates) -> tuple[Number, Number]:
    """Returns the (forward, backward) seconds of output projection and loss for one micro-batch.

    They include the transform, and the work of further predictions outside their blocks.
    """
    model = workload.model
    parallel = workload.parallel
    tokens = workload.tokens
    ahead = flops.prediction_blocks(model)
    loss = (1 + ahead) * tokens * model.vocab / parallel.tp * rate.logits_bytes * rate.byte_s
    head = (1 + ahead) * _head_seconds(workload, rate)
    # These matrices are whole on every tensor-parallel rank.
    own_tokens = tokens / workload.sequence_shards
    if ahead:
        head += ahead * own_tokens * 4 * model.hidden**2 * rate.gemm16_s
    if model.head_transform:
        head += own_tokens * 2 * model.hidden**2 * rate.gemm16_s
    return head + loss, head * (1.0 + rate.weight_gradients) + 1.5 * loss


class Compute(NamedTuple):
    """The compute of one micro-batch, which depends neither on the pipeline nor on the replicas."""

    kinds: tuple[LayerSeconds, LayerSeconds]  # (dense layer, MoE layer)
    loss: tuple[Number, Number]  # (forward, backward) of output projection and loss
    overlap_s: dict[str, Number]  # seconds of the matrix product that an operation overlaps with


def micro_batch_compute(workload: Workload, rate: Rates) -> Compute:
    """Returns the compute of one micro-batch."""
    kinds = layer_seconds_by_kind(workload, rate)
    loss = loss_seconds(workload, rate)
    return Compute(kinds, loss, overlap_seconds(workload, rate, kinds))


#: Bytes per parameter that narrow moments (`Optim.state`) add to an update. Operators of torch
#: widen and narrow them one after the other; a test counts their bytes.
NARROW_STATE = {"8bit": 128.0, "bf16": 238.0}


def optimizer_seconds(parameters: float, shards: int, rate: Rates) -> Number:
    """Returns the seconds of AdamW on `parameters / shards` parameters, and of the CPU around it.

    Memory bandwidth bounds the update. It reads gradient, master weight and both moments, and
    writes the last three and the weight: 30 bytes per parameter.
    """
    return (
        parameters / shards * rate.optimizer_bytes * rate.byte_s * rate.weight_gradients
        + rate.step_host_s
    )
