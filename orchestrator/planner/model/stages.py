"""Pipeline stages: how many layers each has, and which ranks hold them."""

from __future__ import annotations

from functools import lru_cache
from heapq import heapify, heapreplace

from orchestrator.plan.document import Model, Parallel
from orchestrator.plan.schedules import SCHEDULES, TABLE, schedule_of
from orchestrator.plan.supported import WHOLE_BACKWARD

from .layers import head_flops, layer_flops


def balance_stages(model: Model, stages: int, seq_len: int, tolerance: float = 0.03) -> list[int]:
    """Decoder layers of each stage, in model order, such that the slowest stage is as fast as possible.

    The head counts as work of the last stage; of equal stages the first gets fewer layers, as it holds the token table.
    For 126 layers in 16 stages that gives the 7, 8, ..., 8, 7 of Llama 3 (arXiv 2407.21783, section 3.3.2). An even
    split is taken where it is within `tolerance` of the best, because equal stages interleave better. Two stages more
    than layers: embedding and head stand alone.
    """
    if stages == model.layers + 2:
        return [0] + [1] * model.layers + [0]
    head = head_flops(model) / layer_flops(model, model.layers - 1, seq_len).total  # in layers
    return list(_balance(model.layers, stages, head, tolerance))


@lru_cache(maxsize=4096)
def _balance(layers: int, stages: int, head: float, tolerance: float) -> tuple[int, ...]:
    if stages == 1:
        return (layers,)
    extra = [0.0] * stages
    extra[-1] += head
    counts = [1] * stages
    # the next layer goes to the stage with the least work; ties: middle stages first, then the last stage, the first
    # stage last
    least = [(2 + extra[s], s == 0, s == stages - 1, s) for s in range(stages)]
    heapify(least)
    for _ in range(layers - stages):
        _, first, last, stage = least[0]
        counts[stage] += 1
        heapreplace(least, (counts[stage] + 1 + extra[stage], first, last, stage))
    slowest = max(count + more for count, more in zip(counts, extra, strict=True))
    if layers % stages == 0:
        even = layers // stages + head
        if even <= slowest * (1 + tolerance):
            return (layers // stages,) * stages
    return tuple(counts)


def splits_backward(parallel: Parallel) -> bool:
    """Whether backward is split: inputs' gradients first, weights' gradients later."""
    if parallel.schedule == TABLE:
        return schedule_of(parallel).splits_backward
    return parallel.schedule not in WHOLE_BACKWARD


def rank_stages(parallel: Parallel) -> list[tuple[int, ...]]:
    """Model stages of each pipeline rank, in model order. With DualPipe a rank holds a stage of each direction."""
    return list(_held(parallel.pp, parallel.pp * parallel.vpp, tuple(_stage_ranks(parallel))))


@lru_cache(maxsize=256)
def _held(pp: int, stages: int, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """`ranks`: of each stage, in both directions where a schedule has two."""
    held: list[list[int]] = [[] for _ in range(pp)]
    for stage, rank in enumerate(ranks):
        held[rank].append(stage % stages)
    return [tuple(own) for own in held]


def _stage_ranks(parallel: Parallel) -> tuple[int, ...]:
    if parallel.schedule == TABLE:
        return schedule_of(parallel).stage_rank
    return SCHEDULES[parallel.schedule].place(parallel.pp, parallel.vpp)


def stage_range(parallel: Parallel, stage: int) -> range:
    """Decoder layers of a virtual stage."""
    start = sum(parallel.stage_layers[:stage])
    return range(start, start + parallel.stage_layers[stage])
