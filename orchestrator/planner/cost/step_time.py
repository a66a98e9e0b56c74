"""Seconds of one optimizer step: compute, exposed communication by axis, pipeline bubble, optimizer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from msgspec import Struct

from orchestrator.plan import Plan
from orchestrator.plan.document import AXES, Axis, Model, Parallel, Time, Train
from orchestrator.plan.schedules import TABLE, Costs, Timeline, schedule_of, simulate
from orchestrator.planner.model.stages import rank_stages

from . import collective
from .compute import (
    Rates,
    StageSeconds,
    layer_seconds_by_kind,
    optimizer_seconds,
    overlap_seconds,
    rates,
    stage_seconds,
)
from .fabric import Path, Pattern
from .pipeline import EQUAL, rank_seconds, span_seconds
from .profile import profile_of
from .traffic import Overlap, Traffic, rank_parameters

#: (axes that vary in a group, pattern): what a path on a given cluster in a given nesting order depends on.
PathKey = tuple[tuple[Axis, ...], Pattern]


class Work(Struct, frozen=True):
    """Compute of a step: everything that does not depend on where the ranks are."""

    stages: list[StageSeconds]  # one micro-batch through each model stage
    ranks: list[float]  # one micro-batch, forward and backward, through all stages of each pipeline rank
    ahead: list[tuple[float, int]]  # of each rank: (forward seconds, number) of the stages before its first
    windows: dict[str, float]  # seconds per step that can hide communication, by `traffic.Window`
    overlap_s: dict[Overlap, float]  # seconds of the matrix product that one operation overlaps with
    optimizer_s: float


def step_work(model: Model, parallel: Parallel, train: Train, rate: Rates) -> Work:
    """The compute of one step, from the cost model's rates."""
    kinds = layer_seconds_by_kind(model, parallel, train, rate)
    stages = stage_seconds(model, parallel, train, rate, kinds)
    by_rank = [[stages[stage] for stage in held] for held in rank_stages(parallel)]
    ranks = rank_seconds(parallel, [stage.both for stage in stages])
    slowest = by_rank[ranks.index(max(ranks))]
    m = parallel.micro_batches
    shards = parallel.dp * parallel.ep * parallel.cp if parallel.zero else 1
    most = max(map(sum, rank_parameters(model, parallel)))
    return Work(
        stages=stages,
        ranks=ranks,
        ahead=[(sum(stage.forward for stage in stages[:first]), first) for first in map(min, rank_stages(parallel))],
        windows={
            "none": 0.0,
            "attention": m * 3 * sum(stage.attention_core for stage in slowest),
            "backward": sum(stage.backward for stage in slowest),  # of the last micro-batch
            "compute": m * ranks[by_rank.index(slowest)],
        },
        overlap_s=overlap_seconds(model, parallel, train, rate, kinds),
        optimizer_s=optimizer_seconds(most, shards, rate),
    )


def exposed_seconds(traffic: Sequence[Traffic], paths: Mapping[PathKey, Path], work: Work, pp: int) -> dict[str, float]:
    """Communication that no compute hides, by axis, in seconds per step.

    The last operation of an overlapped series is always exposed. A 1F1B pipeline has no slack between a micro-batch's
    last forward and its first backward, so every transfer between stages is exposed.
    """
    result: dict[str, float] = dict.fromkeys(AXES, 0.0)
    for item in traffic:
        path = paths[item.varying, collective.PATTERN[item.operation]]
        once = max(
            0.0, collective.seconds(item.operation, item.size, item.members, path) - work.overlap_s[item.overlap]
        )
        count = item.count + (2 * (pp - 1) if item.axis == "pp" else 0)
        total = once * count
        hidden = min(work.windows[item.window], max(0.0, total - once))
        result[item.axis] += total - hidden
    return result


def assemble(work: Work, exposed: Mapping[str, float], parallel: Parallel) -> tuple[float, float, float]:
    """(step seconds, bubble seconds of the slowest rank, bubble ratio = idle / busy over the pipeline)."""
    m = parallel.micro_batches
    # tp, cp and ep are on the path of every micro-batch and stage; a third of it in forward
    inner = sum(exposed[axis] for axis in ("tp", "cp", "ep")) / m / parallel.vpp
    forward = [stage.forward + inner / 3 for stage in work.stages]
    backward = [stage.backward + inner * 2 / 3 for stage in work.stages]
    span, idle = span_seconds(parallel, forward, backward)
    slowest = max(work.ranks) + inner * parallel.vpp
    step = span + exposed["pp"] + exposed["dp"] + work.optimizer_s
    return step, max(0.0, span - m * slowest), idle


def step_lower_bound(work: Work, exposed: Mapping[str, float], parallel: Parallel) -> float:
    """Lower bound of the step seconds of `assemble` that needs no simulation.

    Each rank waits until a micro-batch has come through the stages ahead of it, then does all of its work.
    """
    inner = sum(exposed[axis] for axis in ("tp", "cp", "ep")) / parallel.micro_batches
    m, each = parallel.micro_batches, inner / parallel.vpp / 3
    span = max(
        ahead + stages * each + m * (rank + inner) for (ahead, stages), rank in zip(work.ahead, work.ranks, strict=True)
    )
    return (span + exposed["pp"] + exposed["dp"] + work.optimizer_s) * (1 - EQUAL)


def predict(work: Work, exposed: Mapping[str, float], parallel: Parallel, outside: Container[str] = ()) -> Time:
    """The plan's `time`. `outside`: axes whose groups leave their NVLink domain, for the advice in `limited_by`."""
    step, bubble, _ = assemble(work, exposed, parallel)
    compute = parallel.micro_batches * max(work.ranks) + work.optimizer_s
    return Time(
        step_s=step,
        compute_s=compute,
        exposed_comm_s=dict(exposed),
        bubble_ratio=bubble / step,
        limited_by=_limited_by(step, compute, bubble, exposed, parallel, outside),
    )


ADVICE = {
    "tp": "tensor-parallel communication: lower tp",
    "cp": "context-parallel communication: lower cp or raise the sequence length a rank",
    "ep": "expert all-to-all: lower ep",
    "pp": "transfers between pipeline stages: lower pp or raise the micro-batch size",
    "dp": "gradient synchronisation: raise the micro-batches a step, or lower dp",
    "bubble": "the pipeline bubble: more micro-batches, virtual stages (vppN) or a lower pp",
}


def _limited_by(
    step: float,
    compute: float,
    bubble: float,
    exposed: Mapping[str, float],
    parallel: Parallel,
    outside: Container[str],
) -> str:
    """The largest term that is not compute and what reduces it; compute itself when no other term reaches 5 %."""
    terms = {**exposed, "bubble": bubble}
    worst = max(terms, key=lambda name: terms[name])
    share = terms[worst] / step
    if share < 0.05:
        return f"compute ({compute / step:.0%} of the step)"
    if worst == "bubble" and parallel.pp > 1 and parallel.micro_batches * parallel.vpp < parallel.pp:
        return f"the pipeline bubble ({share:.0%} of the step): fewer micro-batches than stages; raise the global batch"
    inside = ", so that its groups stay inside one NVLink domain" if worst in ("tp", "ep") and worst in outside else ""
    return f"{ADVICE[worst]}{inside} ({share:.0%} of the step)"


def pipeline_timeline(plan: Plan, most_micro_batches: int = 16) -> Timeline:
    """The pipeline of a plan, simulated: start and end in seconds of every action of its first micro-batches."""
    par, train = plan.parallel, plan.job.train
    rate = rates(plan.cluster, profile_of(plan.cluster), train.precision)
    work = step_work(plan.model, par, train, rate)
    exposed = plan.time.exposed_comm_s
    inner = sum(exposed.get(axis, 0.0) for axis in ("tp", "cp", "ep")) / par.micro_batches / par.vpp
    forward = tuple(stage.forward + inner / 3 for stage in work.stages)
    half = tuple((stage.backward + inner * 2 / 3) / 2 for stage in work.stages)
    shown = None if par.schedule == TABLE else min(par.micro_batches, most_micro_batches)
    return simulate(schedule_of(par, shown), Costs(forward, half, half))
