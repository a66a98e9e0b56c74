"""Pipeline stages: their numbers of layers, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from orchestrator.plan import expert_mesh
from orchestrator.plan.document import Model, Parallel
from orchestrator.plan.flops import prediction_blocks, prediction_weights
from orchestrator.plan.ranks import embeds_at_both_ends
from orchestrator.plan.schedules import SCHEDULES, TABLE, schedule_of

from .layers import (
    dense_and_moe,
    dense_on_rank,
    embedding_norm_params,
    embedding_params,
    head_flops,
    head_params,
    layer_flops,
    layer_params,
    norm_params,
    prediction_params,
    sample_layers,
    vectors_on_rank,
)


def balance_stages(
    model: Model,
    stages: int,
    seq_len: int,
    tolerance: float = 0.03,
) -> list[int]:
    """Returns the decoder layers of each stage in model order, with the fastest slowest stage.

    Head and further predictions count as work of the last stage. Of equal stages, the first one
    gets fewer layers, because it holds the token table. For 126 layers in 16 stages that gives the
    7, 8, ..., 8, 7 of Llama 3 (arXiv 2407.21783, section 3.3.2). An even split is taken if it is
    within `tolerance` of the best, because equal stages interleave better. With two stages more
    than layers, embedding and head are stages of their own.
    """
    if stages == model.layers + 2:
        return [0] + [1] * model.layers + [0]
    layer = layer_flops(model, model.layers - 1, seq_len).total
    ahead = prediction_blocks(model)
    # Work of the head and further predictions, in layers.
    head = (head_flops(model) + ahead * 2.0 * prediction_weights(model)) / layer + ahead
    return list(_balance(model.layers, stages, head, tolerance))


@lru_cache(maxsize=4096)
def _balance(
    layers: int,
    stages: int,
    head: float,
    tolerance: float,
) -> tuple[int, ...]:
    """Returns the layers of each stage; `head` is the last stage's additional work in layers."""
    if stages == 1:
        return (layers,)
    extra = [0.0] * stages
    extra[-1] += head
    counts = [1] * stages
    # The next layer goes to the stage with the least work. Among ties, middle stages come first,
    # then the last stage, then the first one.
    least = [(2 + extra[s], s == 0, s == stages - 1, s) for s in range(stages)]
    heapify(least)
    for _ in range(layers - stages):
        _, first, last, stage = least[0]
        counts[stage] += 1
        heapreplace(
            least,
            (counts[stage] + 1 + extra[stage], first, last, stage),
        )
    slowest = max(
        count + outside_layers for count, outside_layers in zip(counts, extra, strict=True)
    )
    if layers % stages == 0:
        even = layers // stages + head
        if even <= slowest * (1 + tolerance):
            return (layers // stages,) * stages
    return tuple(counts)


def rank_stages(parallel: Parallel) -> list[tuple[int, ...]]:
    """Returns the model stages of each pipeline rank, in model order.

    With DualPipe a rank holds a stage of each direction.
    """
    if parallel.schedule == TABLE:
        return _held(
            parallel.pp,
            parallel.pp * parallel.vpp,
            schedule_of(parallel).stage_rank,
        )
    return list(_placed(parallel.schedule, parallel.pp, parallel.vpp))


@lru_cache(maxsize=256)
def _placed(schedule: str, pp: int, vpp: int) -> list[tuple[int, ...]]:
    """Returns the model stages of each pipeline rank of a built-in schedule."""
    return _held(pp, pp * vpp, SCHEDULES[schedule].place(pp, vpp))


def _held(pp: int, stages: int, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the stages of each rank.

    `ranks` has the rank of each stage, in both directions if a schedule has two.
    """
    held: list[list[int]] = [[] for _ in range(pp)]
    for stage, rank in enumerate(ranks):
        held[rank].append(stage % stages)
    return [tuple(stages_of_rank) for stages_of_rank in held]


def held_layers(model: Model, parallel: Parallel, stage: int) -> range:
    """Returns the decoder layers of a virtual stage.

    The last stage also has the blocks that predict further tokens.
    """
    decoder_layers = stage_range(parallel, stage)
    last = stage == len(parallel.stage_layers) - 1
    return range(decoder_layers.start, decoder_layers.stop + prediction_blocks(model) * last)


def stage_range(parallel: Parallel, stage: int) -> range:
    """Returns the decoder layers of a virtual stage."""
    start = sum(parallel.stage_layers[:stage])
    return range(start, start + parallel.stage_layers[stage])


def rank_vectors(model: Model, parallel: Parallel, stages: Sequence[int]) -> int:
    """Returns the parameters in norms and biases of a rank that holds `stages`."""
    kinds = [
        0 if layer is None else vectors_on_rank(model, layer, parallel.tp)
        for layer in sample_layers(model)
    ]
    total = 0
    last = len(parallel.stage_layers) - 1
    ahead = prediction_blocks(model)
    for stage in stages:
        held = held_layers(model, parallel, stage)
        numbers = dense_and_moe(model, held.start, held.stop)
        total += sum(
            layer_count * vectors for layer_count, vectors in zip(numbers, kinds, strict=True)
        )
        if stage == 0:
            total += embedding_norm_params(model)
        if stage == last:
            matrix = model.hidden**2 if model.head_transform else 0
            total += head_params(model, parallel.tp) - matrix + 3 * ahead * norm_params(model)
    return total


def rank_matrices(model: Model, parallel: Parallel, stages: Sequence[int]) -> int:
    """Returns the parameters in matrices of blocks, without experts, of a rank that holds
    `stages`."""
    kinds = [
        0
        if layer is None
        else dense_on_rank(model, layer, parallel.tp) - vectors_on_rank(model, layer, parallel.tp)
        for layer in sample_layers(model)
    ]
    total = 0
    for stage in stages:
        held = held_layers(model, parallel, stage)
        numbers = dense_and_moe(model, held.start, held.stop)
        total += sum(count * matrices for count, matrices in zip(numbers, kinds, strict=True))
    return total


def rank_parameters(model: Model, parallel: Parallel) -> list[tuple[int, int]]:
    """Returns the (dense, expert) parameters of each pipeline rank, over all of its virtual stages.

    They are those on one rank of it. With pp > 1 the last stage holds a copy of a tied table as its
    head, and one to predict further tokens.
    """
    kinds = []
    for layer in sample_layers(model):
        if layer is None:
            kinds.append((0, 0))
        else:
            experts = layer_params(model, layer).experts // (
                parallel.tp * expert_mesh.spread(parallel)
            )
            kinds.append((dense_on_rank(model, layer, parallel.tp), experts))
    (dense, dense_experts), (moe, moe_experts) = kinds
    stages = []
    for stage in range(len(parallel.stage_layers)):
        held = held_layers(model, parallel, stage)
        dense_count, moe_count = dense_and_moe(model, held.start, held.stop)
        stages.append(
            [
                dense_count * dense + moe_count * moe,
                dense_count * dense_experts + moe_count * moe_experts,
            ]
        )
    table, positions = embedding_params(model)
    table = -(-model.vocab // parallel.tp) * model.hidden  # padded to a multiple of tp
    stages[0][0] += table + positions
    last = len(stages) - 1
    ahead = prediction_blocks(model)
    stages[-1][0] += head_params(model, parallel.tp) + ahead * prediction_params(model)
    stages[-1][0] += 0 if model.tied_embeddings else table
    # a rank with both ends holds one table
    shared = table if embeds_at_both_ends(model) and last else 0
    stages[-1][0] += shared
    return [
        (
            sum(stages[stage][0] for stage in held) - (shared if 0 in held and last in held else 0),
            sum(stages[stage][1] for stage in held),
        )
        for held in rank_stages(parallel)
    ]
