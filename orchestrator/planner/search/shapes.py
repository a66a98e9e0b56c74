"""How layers lie on pipeline ranks: what bounds need of it, once for all spots that share it."""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.plan.document import Model, Parallel
from orchestrator.planner.model_math import dense_and_moe
from orchestrator.planner.pipeline import rank_stages
from orchestrator.planner.traffic import sends_a_micro_batch


class RankShape(NamedTuple):
    """What one pipeline rank holds (of both directions, where a schedule has two), by kind of layer."""

    dense: int
    moe: int
    head: int  # copies of the last stage
    table: int  # copies of the first stage
    rank: int  # the first rank that holds this: it keeps the most micro-batches
    before: tuple[int, int, int]  # stages, dense layers, mixtures ahead of the last rank that holds this


class Shape(NamedTuple):
    copies: int  # of the model on the pipeline
    ranks: list[RankShape]  # one for all ranks that hold the same
    sends: float  # messages a micro-batch of the rank that sends most
    single: bool  # the whole model is one stage


def shape_of(model: Model, parallel: Parallel) -> Shape:
    held = rank_stages(parallel)
    stages = len(parallel.stage_layers)
    starts = [0]
    for count in parallel.stage_layers:
        starts.append(starts[-1] + count)
    kinds = [dense_and_moe(model, starts[s], starts[s + 1]) for s in range(stages)]
    alike: dict[tuple[int, int, int, int], tuple[int, int]] = {}  # what is held -> (first rank, latest first stage)
    for rank, own in enumerate(held):
        dense, moe = sum(kinds[s][0] for s in own), sum(kinds[s][1] for s in own)
        key = dense, moe, own.count(stages - 1), own.count(0)
        first, latest = alike.get(key, (rank, 0))
        alike[key] = first, max(latest, min(own))
    ranks = [
        RankShape(*key, rank, (stage, *dense_and_moe(model, 0, starts[stage]))) for key, (rank, stage) in alike.items()
    ]
    return Shape(sum(map(len, held)) // stages, ranks, sends_a_micro_batch(parallel), stages == 1)
