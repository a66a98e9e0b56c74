"""How layers lie on pipeline ranks: what bounds need of it, once for all spots that share it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.plan.document import Model, Parallel
from orchestrator.planner.cost.traffic import sends_a_micro_batch
from orchestrator.planner.model.layers import dense_and_moe
from orchestrator.planner.model.stages import rank_stages


class RankShape(NamedTuple):
    """What one pipeline rank holds (of both directions, where a schedule has two), by kind of layer."""

    dense: int
    moe: int
    head: int  # copies of the last stage
    table: int  # copies of the first stage
    rank: int  # the first rank that holds this: it keeps the most micro-batches
    before: tuple[int, int, int]  # stages, dense layers, mixtures ahead of the last rank that holds this


class Shape(NamedTuple):
    key: tuple[str, int, int]  # how stages are placed, pp, vpp
    copies: int  # of the model on the pipeline
    ranks: list[RankShape]  # one for all ranks that hold the same
    sends: float  # messages a micro-batch of the rank that sends most
    single: bool  # the whole model is one stage


class Way(NamedTuple):
    """The rank with most layers ahead of it, in some shapes: what they have at least."""

    before: int  # layers
    own: float  # layers, a copy of the model
    sends: float
    split: bool  # backward is in two pieces: only forward must come through all stages ahead


class Pipes(NamedTuple):
    """All shapes of a pipeline together."""

    least: float  # layers of any rank, a copy of the model
    most: int  # layers of any rank, all its copies
    ways: list[Way]


def shape_of(place: str, model: Model, parallel: Parallel) -> Shape:
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
    copies, key = sum(map(len, held)) // stages, (place, parallel.pp, parallel.vpp)
    return Shape(key, copies, ranks, sends_a_micro_batch(parallel), stages == 1)


def pipes_of(shapes: Iterable[tuple[Shape, bool]]) -> Pipes:
    """What holds for all of some shapes, each with whether backward is in two pieces."""
    least, most = float("inf"), 0
    groups: dict[tuple[bool, int], Way] = {}  # by size of vpp: more virtual stages wait less and send more
    for shape, split in shapes:
        layers = [rank.dense + rank.moe for rank in shape.ranks]
        least, most = min(least, min(layers) / shape.copies), max(most, *layers)
        last = max(range(len(layers)), key=lambda index: shape.ranks[index].before)
        before = sum(shape.ranks[last].before[1:])
        way = Way(before, layers[last] / shape.copies, shape.sends, split)
        key = split, shape.key[2].bit_length()
        other = groups.get(key, way)
        groups[key] = Way(*(min(pair) for pair in zip(way[:3], other[:3], strict=True)), split)
    ways = list(groups.values())
    return Pipes(least, most, [way for way in ways if not any(_under(other, way) for other in ways)])


def _under(other: Way, way: Way) -> bool:
    """Whether `other` bounds whatever `way` bounds, and lower."""
    lower = all(a <= b for a, b in zip(other[:3], way[:3], strict=True))
    return other != way and lower and other.split >= way.split
