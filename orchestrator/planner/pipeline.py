"""The pipeline schedule as the planner needs it: which stages a rank holds, how long a step spans, what is in flight.

Schedules and their simulator live in `orchestrator.plan.schedules`; the trainer executes the same data. Where a closed
form is exact it is used (Narayanan et al. 2021, arXiv 2104.04473, section 2.2); the rest is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from orchestrator.plan.document import Parallel
from orchestrator.plan.schedules import (
    SCHEDULES,
    TABLE,
    Costs,
    Schedule,
    build,
    peak_in_flight,
    schedule_of,
    simulate,
)

CLOSED_FORM = ("1f1b", "interleaved", "afab")
EQUAL = 1e-6  # relative difference below which stages count as equal


def rank_stages(parallel: Parallel) -> list[tuple[int, ...]]:
    """Model stages that each pipeline rank holds, in model order. DualPipe holds a stage of each direction."""
    stages = parallel.pp * parallel.vpp
    held: list[list[int]] = [[] for _ in range(parallel.pp)]
    for stage, rank in enumerate(_stage_ranks(parallel)):
        held[rank].append(stage % stages)
    return [tuple(stages) for stages in held]


def _stage_ranks(parallel: Parallel) -> tuple[int, ...]:
    if parallel.schedule == TABLE:
        return schedule_of(parallel).stage_rank
    return SCHEDULES[parallel.schedule].place(parallel.pp, parallel.vpp)


@lru_cache(maxsize=64)
def _schedule(name: str, pp: int, micro_batches: int, vpp: int) -> Schedule:
    return build(name, pp, micro_batches, vpp)


def _enough(pp: int, micro_batches: int, vpp: int) -> int:
    """No more micro-batches than warm-up, some steady state and drain need. Even, as two-way schedules want it."""
    return min(micro_batches, 6 * pp * vpp + 4)


def rank_seconds(parallel: Parallel, stages: Sequence[float]) -> list[float]:
    """Seconds of one micro-batch on each pipeline rank, from those of each model stage.

    A bidirectional schedule holds the model twice and sends half of the micro-batches each way.
    """
    held = rank_stages(parallel)
    copies = sum(map(len, held)) // len(stages)
    return [sum(stages[stage] for stage in own) / copies for own in held]


def span_seconds(parallel: Parallel, forward: Sequence[float], backward: Sequence[float]) -> tuple[float, float]:
    """(seconds from the first forward to the last backward, idle / busy time over all ranks).

    forward, backward: seconds of one micro-batch through each model stage, communication inside the stage included.

    With equal stages 1F1B, interleaved 1F1B and all-forward-all-backward idle (p-1)/(v*m) of the busy time. Everything
    else is simulated for a few micro-batches; each further one costs the slowest rank's time.
    """
    work = rank_seconds(parallel, [f + b for f, b in zip(forward, backward, strict=True)])
    busy = parallel.micro_batches * sum(work)
    if parallel.schedule in CLOSED_FORM and max(work) <= min(work) * (1 + EQUAL):
        ratio = (parallel.pp - 1) / (parallel.vpp * parallel.micro_batches)
        return busy * (1 + ratio) / parallel.pp, ratio
    if parallel.schedule == TABLE:
        half = tuple(seconds / 2 for seconds in backward)
        span = simulate(schedule_of(parallel), Costs(tuple(forward), half, half)).makespan
        return span, (parallel.pp * span - busy) / busy
    names = (parallel.schedule, parallel.pp, parallel.micro_batches, parallel.vpp)
    span = _simulated_span(*names, tuple(forward), tuple(backward), max(work))
    return span, (parallel.pp * span - busy) / busy


@lru_cache(maxsize=256)
def _simulated_span(
    name: str,
    pp: int,
    micro_batches: int,
    vpp: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    slowest: float,
) -> float:
    schedule = _schedule(name, pp, _enough(pp, micro_batches, vpp), vpp)
    half = tuple(seconds / 2 for seconds in backward)  # input and weight gradient
    shown = simulate(schedule, Costs(forward, half, half)).makespan
    return shown + (micro_batches - schedule.micro_batches) * slowest


def in_flight(parallel: Parallel) -> list[float]:
    """Micro-batches, each through one virtual stage, whose activations each pipeline rank holds at its peak.

    1F1B: min(p - r, m); interleaved: its warm-up of 2(p-r-1) + (v-1)p and one more (arXiv 2104.04473, section 2.2);
    all-forward-all-backward: every one; others: counted on the schedule.
    """
    p, v, m = parallel.pp, parallel.vpp, parallel.micro_batches
    if parallel.schedule == "afab":
        return [m * v] * p
    if parallel.schedule == "1f1b":
        return [min(m, p - rank) for rank in range(p)]
    if parallel.schedule == "interleaved":
        return [min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) for rank in range(p)]
    if parallel.schedule == TABLE:
        return list(peak_in_flight(schedule_of(parallel)))
    return list(peak_in_flight(_schedule(parallel.schedule, p, _enough(p, m, v), v)))
