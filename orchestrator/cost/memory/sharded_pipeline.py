"""The peak of a pipeline rank whose weights ZeRO-3 shards: its highest moment.

Such a rank gathers the weights of its own stages once per step and keeps them. Gradients are whole
for one unit at a time: a block, or the tensors at an end of the model. Backward makes them as wide
as the weights, and then they are copied as they are summed. That copy is held until the next unit's
gradients are complete (torch's `fully_shard`). Measured by `orch twin` (docs/twin.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.cost.model.layers import (
    DTYPE_BYTES,
    embedding_params,
    layer_groups,
    layer_params,
    sample_layers,
)
from orchestrator.cost.model.stages import held_layers, rank_stages
from orchestrator.cost.time.pipeline import in_flight
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Model, Parallel
from orchestrator.plan.expert_mesh import spread
from orchestrator.plan.flops import prediction_blocks

from .activations import backward_bytes, bytes_of_layers, head_bytes, loss_bytes
from .kernels import Kernels
from .moments import Peak, whole_layer


class RankActivations(NamedTuple):
    """Activation bytes of a pipeline rank."""

    peak: float  # bytes at their own peak
    in_backward: float  # bytes when a backward enters its first layer, without what the loss keeps
    recomputed_layer: (
        float  # the part of these that a recomputed layer holds until its own backward ends
    )
    micro_batch: float  # bytes from forward to backward, of one micro-batch in one stage
    layer: float  # the same of one layer
    several: bool  # a stage has several layers
    first_only: bool  # all micro-batches are held at the first backward, and at no later one


class Temporaries(NamedTuple):
    """Bytes that are held for a part of a backward."""

    loss: float
    layer: float  # gradients inside a layer

    @classmethod
    def of(cls, workload: Workload, kernels: Kernels) -> Temporaries:
        """Returns the temporaries of a layout."""
        return cls(loss_bytes(workload, kernels), backward_bytes(workload, kernels))


class Moment(NamedTuple):
    """Bytes at one moment of a backward."""

    activations: float
    buffers: float
    summed: float = 0.0  # bytes that are held of the gradients that the first backward sums


def _activations_of_rank(
    workload: Workload,
    kernels: Kernels,
    rank: int,
    peak_bytes: float,
) -> RankActivations:
    """Returns the activation bytes of a pipeline rank without a split backward.

    `peak_bytes` is the rank's result of `activations`.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    layer_bytes = bytes_of_layers(workload, kernels)
    stages = rank_stages(parallel)[rank]
    held = [held_layers(model, parallel, stage) for stage in stages]
    groups = [
        (n, layer_bytes(kind, mode, tuple(held)))
        for kind, mode, n in layer_groups(model, train, held)
        if n
    ]
    recomputing = max((layer.recomputing for _, layer in groups), default=0.0)
    loss = head_bytes(workload, kernels) if len(parallel.stage_layers) - 1 in stages else 0.0
    return RankActivations(
        peak=peak_bytes,
        in_backward=peak_bytes - max(0.0, loss - recomputing),
        recomputed_layer=recomputing,
        micro_batch=sum(n * layer.stored for n, layer in groups) / len(stages),
        layer=max((layer.stored for _, layer in groups), default=0.0),
        several=max(map(len, held)) > 1,
        first_only=in_flight(parallel)[rank] >= parallel.micro_batches * len(stages),
    )


def peak_of_sharded_rank(
    workload: Workload,
    kernels: Kernels,
    pp_rank: int,
    peak_bytes: float,
    temporaries: Temporaries,
    grads: float,
) -> Peak:
    """Returns the highest moment of a pipeline rank without a split backward.

    `peak_bytes` is the rank's result of `activations`, and `grads` the bytes of gradients between
    steps.
    """
    parallel = workload.parallel
    rank = _activations_of_rank(workload, kernels, pp_rank, peak_bytes)
    stages = rank_stages(parallel)[pp_rank]
    ends = (0 in stages, len(parallel.stage_layers) - 1 in stages)
    highest = -1.0
    peak = Peak(0.0, 0.0)
    for moment in _moments(workload, rank, temporaries, ends):
        late = max(0.0, grads - moment.summed) if rank.first_only else 0.0
        cases = [(moment.activations, late)]
        if late:
            cases.append((moment.activations - rank.micro_batch, 0.0))
        for activations, missing in cases:
            total = activations + moment.buffers - missing
            if total > highest:
                highest = total
                peak = Peak(moment.buffers, rank.peak - activations + missing)
    return peak


def _moments(
    workload: Workload,
    rank: RankActivations,
    temporaries: Temporaries,
    ends: tuple[bool, bool],
) -> Iterator[Moment]:
    """Yields the moments of a backward in order: at the loss, head, last two layers, embedding.

    `ends` tells whether the rank has the model's (first stage, last stage).
    """
    first, last = ends
    if last:
        yield Moment(rank.peak, temporaries.loss)
        yield _head_moment(workload, rank)
    head = _head_gradients(workload) if last else NO_HEAD
    yield from _layer_moments(workload, rank, temporaries.layer, head)
    if first:
        yield from _embedding_moments(workload, rank)


class HeadGradients(NamedTuple):
    """Bytes of gradients of the head that are held while backward runs through the last layer."""

    waiting: float  # as made
    sent: float  # copied as they are summed


NO_HEAD = HeadGradients(0.0, 0.0)


def _head_gradients(workload: Workload) -> HeadGradients:
    """Returns the gradients of the head on the rank that has the model's last stage."""
    table = _table(workload)
    if _head_belongs_to_stage(workload.model):
        return HeadGradients(waiting=table * workload.width, sent=0.0)
    return HeadGradients(waiting=0.0, sent=table * _gradient_width(workload))


def _head_belongs_to_stage(model: Model) -> bool:
    """Reports whether the table of the head belongs to the unit of the whole stage."""
    return model.tied_embeddings or prediction_blocks(model) > 0


def _head_moment(workload: Workload, rank: RankActivations) -> Moment:
    """Returns the moment at which the gradients of the head are copied."""
    weight = workload.width
    gradient = _gradient_width(workload)
    table = _table(workload)
    if _head_belongs_to_stage(workload.model):
        end = rank.in_backward - rank.recomputed_layer - rank.micro_batch
        shards = _shards(workload.parallel)
        return Moment(end, table * (weight + gradient), table * gradient / shards)
    sent = table * gradient
    return Moment(
        rank.in_backward - rank.recomputed_layer,
        table * weight + sent + workload.boundary_bytes,
    )


def _layer_moments(
    workload: Workload,
    rank: RankActivations,
    temporary: float,
    head: HeadGradients,
) -> Iterator[Moment]:
    """Yields the moments of the last two layers.

    `temporary` is the bytes of `Temporaries.layer`.
    """
    model = workload.model
    parallel = workload.parallel
    weight = workload.width
    gradient = _gradient_width(workload)
    hidden = workload.boundary_bytes
    shards = _shards(parallel)
    waiting = head.waiting
    layer = temporary + _last_matrix(model, parallel) * weight + waiting
    yield Moment(rank.in_backward, layer + head.sent)
    unit = _unit(model, parallel)
    without_layer = rank.in_backward - rank.recomputed_layer - rank.layer
    # gradients as made, and their copy; then the copy and the sum
    for elements in (unit, whole_layer(model, parallel) - unit):
        yield Moment(without_layer, waiting + elements * (weight + gradient) + 2 * hidden)
        yield Moment(without_layer, waiting + elements * gradient * (1 + 1 / shards) + hidden)
    if rank.several:
        of_last = unit * gradient
        yield Moment(
            rank.in_backward - rank.layer,
            layer + of_last + hidden,
            of_last / shards,
        )


def _embedding_moments(workload: Workload, rank: RankActivations) -> Iterator[Moment]:
    """Yields the moments at which the gradients of the embedding are made, and summed."""
    model = workload.model
    parallel = workload.parallel
    weight = workload.width
    gradient = _gradient_width(workload)
    hidden = workload.boundary_bytes
    shards = _shards(parallel)
    end = rank.in_backward - rank.recomputed_layer - rank.micro_batch
    elements = _table(workload) + embedding_params(model)[1]
    arriving = max(_unit(model, parallel) * gradient + hidden, elements * gradient)
    yield Moment(end, elements * weight + arriving + hidden)
    summed = elements * gradient / shards
    yield Moment(end, elements * gradient * (1 + 1 / shards) + hidden, summed)


def _gradient_width(workload: Workload) -> int:
    """Returns the bytes of an accumulated gradient."""
    return DTYPE_BYTES[workload.train.grad_dtype]


def _table(workload: Workload) -> int:
    """Returns the elements of the token table on a rank."""
    return -(-embedding_params(workload.model)[0] // workload.parallel.tp)


def _unit(model: Model, parallel: Parallel) -> float:
    """Returns the parameters of the largest layer's unit; experts have units of their own."""
    block = whole_layer(model, parallel)
    return block - _experts(model, parallel) if spread(parallel) > 1 else block


def _last_matrix(model: Model, parallel: Parallel) -> float:
    """Returns the elements of the matrix whose gradient comes first in a layer.

    For experts, these are the matrices of all of them.
    """
    moe = model.moe
    dense = (
        model.hidden * model.ffn_hidden / parallel.tp
        if sample_layers(model)[0] is not None
        else 0.0
    )
    if moe is None:
        return dense
    return max(
        dense,
        moe.experts * model.hidden * moe.ffn_hidden / (parallel.tp * spread(parallel)),
    )


def _experts(model: Model, parallel: Parallel) -> float:
    """Returns the parameters of a layer's experts on a rank before data-parallel sharding."""
    layer = sample_layers(model)[1]
    return (
        0.0
        if layer is None
        else layer_params(model, layer).experts / (parallel.tp * spread(parallel))
    )


def _shards(parallel: Parallel) -> int:
    """Returns the number of ranks that share one copy of the parameters."""
    replicas = parallel.cp * parallel.ep * parallel.dp
    return min(replicas, parallel.zero_group or replicas)
