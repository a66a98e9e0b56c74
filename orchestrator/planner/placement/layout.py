"""From a nesting order of the axes to ranks, seats and groups; and from layers to pipeline stages.

A rank is a seat: rank r sits on GPU r % gpus_per_node of node r // gpus_per_node, nodes in topology order. A nesting
order says which coordinate each rank has: the innermost axis varies fastest, so its groups are the closest together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

from orchestrator.plan.document import Axis, Model
from orchestrator.plan.ranks import AXES
from orchestrator.planner.memory.model_math import head_flops, layer_flops


def orders(degrees: Mapping[str, int]) -> Iterator[tuple[Axis, ...]]:
    """Every distinct nesting order, the default (planning.md E1: TP, CP, EP, PP, DP) first.

    An axis of degree 1 may stand anywhere without moving a rank, so it stays at its default place.
    """
    moving = [axis for axis in AXES if degrees[axis] > 1]
    for permutation in itertools.permutations(moving):
        following = iter(permutation)
        yield tuple(next(following) if degrees[axis] > 1 else axis for axis in AXES)


def group_members(order: Sequence[str], degrees: Mapping[str, int], varying: Sequence[str]) -> np.ndarray:
    """Ranks of every group in which only `varying` axes vary: int array [groups, members].

    Members are sorted by those coordinates, the last of `varying` slowest, as in `orchestrator.plan.ranks.groups`.
    """
    outer_first = list(reversed(order))
    grid = np.arange(np.prod([degrees[axis] for axis in outer_first], dtype=int))
    grid = grid.reshape([degrees[axis] for axis in outer_first])
    fixed = [axis for axis in outer_first if axis not in varying]
    last = list(reversed(list(varying)))
    moved = grid.transpose([outer_first.index(axis) for axis in [*fixed, *last]])
    return moved.reshape(-1, int(np.prod([degrees[axis] for axis in varying], dtype=int)))


# ---------------------------------------------------------------------------------------------- stages


def stage_costs(model: Model, stage_layers: Sequence[int], seq_len: int) -> list[float]:
    """Forward FLOPs per token of each stage; the head weighs on the last one (the embedding is a look-up)."""
    costs, start = [], 0
    for count in stage_layers:
        costs.append(sum(layer_flops(model, layer, seq_len).total for layer in range(start, start + count)))
        start += count
    costs[-1] += head_flops(model)
    return costs


def balance_stages(model: Model, stages: int, seq_len: int, tolerance: float = 0.03) -> list[int]:
    """Decoder layers of each of `stages` stages, in model order, so that the slowest stage is as fast as possible.

    The head counts as work of the last stage and the token table as memory of the first: the fullest stages are
    those in the middle, which for 126 layers in 16 stages gives the 7, 8, ..., 8, 7 of Llama 3 (arXiv 2407.21783,
    section 3.3.2). An even split wins when it is within `tolerance` of the best: equal stages interleave better.
    """
    head = head_flops(model) / layer_flops(model, model.layers - 1, seq_len).total  # in layers
    return list(_balance(model.layers, stages, head, tolerance))


@lru_cache(maxsize=4096)
def _balance(layers: int, stages: int, head: float, tolerance: float) -> tuple[int, ...]:
    if stages == 1:
        return (layers,)
    extra = [0.0] * stages
    extra[-1] += head
    counts = [1] * stages
    # the next layer goes to the stage that is least full with it; ties: the middle first, then the end; the first
    # stage last, because it also holds the token table
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
