"""Counts the layers of each kind on pipeline ranks, once for all meshes with the same pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from orchestrator.cost.model.layers import dense_and_moe
from orchestrator.cost.model.stages import held_layers, rank_stages
from orchestrator.cost.time.traffic import sends_per_micro_batch
from orchestrator.plan.document import Model, Parallel


class StageShape(NamedTuple):
    """The parts of a stage whose activations are kept."""

    dense: int
    moe: int
    last: bool


class RankShape(NamedTuple):
    """The layers of a pipeline rank, in both directions if a schedule has two."""

    dense: int
    moe: int
    head: int  # copies of the last stage on the rank
    table: int  # copies of the first stage on the rank
    rank: int  # first of the ranks that hold the same; it has the most micro-batches in flight
    # Stages, dense layers and MoE layers ahead of the last of these ranks.
    before: tuple[int, int, int]
    # The rank among these that is farthest from both ends: it defers the most weight gradients.
    inner: int
    held: tuple[int, ...]  # the model stages of `rank`
    stages: tuple[StageShape, ...]  # of `rank`
    unlike: tuple[StageShape, ...]  # the distinct ones of `stages`; several keep unequal bytes


class PipelineShape(NamedTuple):
    """The ranks and messages of one pipeline."""

    key: tuple[str, int, int]  # stage placement, pp, vpp
    copies: int  # copies of the model on the pipeline
    ranks: list[RankShape]  # one entry for all ranks that hold the same
    sends: float  # as `traffic.sends_per_micro_batch`
    single: bool  # the whole model is a single stage
    unequal: bool  # a rank holds stages that keep unequal bytes


class LatestRank(NamedTuple):
    """The rank that starts last, as lower bounds over several shapes."""

    before: int  # layers ahead of the rank
    layers: float  # layers of the rank, per copy of the model
    sends: float
    split: bool  # backward is split, so only forwards must pass all stages ahead


class PipelineShapes(NamedTuple):
    """Bounds over all shapes of a pipeline."""

    least: float  # the fewest layers of any rank, per copy of the model
    #: Layers of the fullest rank, per copy of the model, in the shape where that rank has the
    #: fewest.
    heaviest: float
    latest_ranks: list[LatestRank]


def pipeline_shape(placement: str, model: Model, parallel: Parallel) -> PipelineShape:
    """Returns the shape of `parallel`'s pipeline.

    `placement` is the name of the stage placement, the first part of its key.
    """
    held = rank_stages(parallel)
    stages = len(parallel.stage_layers)
    starts = [0, *accumulate(parallel.stage_layers)]
    held_by_stage = [held_layers(model, parallel, stage) for stage in range(stages)]
    kinds = [dense_and_moe(model, layers.start, layers.stop) for layers in held_by_stage]
    shapes = [StageShape(*kind, last=stage == stages - 1) for stage, kind in enumerate(kinds)]
    rank_shapes: dict[tuple[object, ...], RankShape] = {}
    for rank, held_stages in enumerate(held):
        stage_shapes = tuple(shapes[stage] for stage in held_stages)
        ahead = (min(held_stages), *dense_and_moe(model, 0, starts[min(held_stages)]))
        same_shape = held_stages.count(0), *sorted(stage_shapes)
        first = rank_shapes.get(same_shape) or _rank_shape(rank, held_stages, stage_shapes, ahead)
        inner = max(
            first.inner,
            rank,
            key=lambda candidate: min(candidate, len(held) - 1 - candidate),
        )
        rank_shapes[same_shape] = first._replace(before=max(first.before, ahead), inner=inner)
    ranks = list(rank_shapes.values())
    return PipelineShape(
        key=(placement, parallel.pp, parallel.vpp),
        copies=sum(map(len, held)) // stages,
        ranks=ranks,
        sends=sends_per_micro_batch(parallel),
        single=stages == 1,
        unequal=any(len(rank.unlike) > 1 for rank in ranks),
    )


def _rank_shape(
    rank: int,
    held: tuple[int, ...],
    stages: tuple[StageShape, ...],
    before: tuple[int, int, int],
) -> RankShape:
    """Returns the shape of a rank that holds the model stages `held`, of these shapes."""
    return RankShape(
        dense=sum(stage.dense for stage in stages),
        moe=sum(stage.moe for stage in stages),
        head=sum(stage.last for stage in stages),
        table=held.count(0),
        rank=rank,
        before=before,
        inner=rank,
        held=held,
        stages=stages,
        unlike=tuple(set(stages)),
    )


def summarize(shapes: Iterable[tuple[PipelineShape, bool]]) -> PipelineShapes:
    """Returns bounds that hold for all of `shapes`: (shape, whether backward is split)."""
    least = heaviest = float("inf")
    # Grouped by the magnitude of vpp, because more virtual stages idle less and send more.
    groups: dict[tuple[bool, int], LatestRank] = {}
    for shape, split in shapes:
        layers = [rank.dense + rank.moe for rank in shape.ranks]
        least = min(least, min(layers) / shape.copies)
        heaviest = min(heaviest, max(layers) / shape.copies)
        last = max(range(len(layers)), key=lambda index: shape.ranks[index].before)
        before = sum(shape.ranks[last].before[1:])
        latest = LatestRank(
            before,
            layers[last] / shape.copies,
            shape.sends,
            split,
        )
        key = split, shape.key[2].bit_length()
        known_latest = groups.get(key, latest)
        groups[key] = LatestRank(
            before=min(latest.before, known_latest.before),
            layers=min(latest.layers, known_latest.layers),
            sends=min(latest.sends, known_latest.sends),
            split=split,
        )
    latest_ranks = list(groups.values())
    return PipelineShapes(
        least,
        heaviest,
        [
            latest
            for latest in latest_ranks
            if not any(_under(known_latest, latest) for known_latest in latest_ranks)
        ],
    )


def _under(bound: LatestRank, latest: LatestRank) -> bool:
    """Reports whether `bound` is a lower bound of everything that `latest` bounds."""
    lower = all(a <= b for a, b in zip(bound[:3], latest[:3], strict=True))
    return bound != latest and lower and bound.split >= latest.split
