"""The pipeline schedule as the planner needs it: which stages a rank holds, how long a step spans, what is in flight.

Schedules and their simulator live in `orchestrator.plan.schedules`; the trainer executes the same data. For 1F1B,
interleaved 1F1B and all-forward-all-backward a closed form is used (Narayanan et al. 2021, arXiv 2104.04473, section
2.2), because searches ask thousands of times; the others are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from orchestrator.plan.document import Parallel
from orchestrator.plan.schedules import SCHEDULES, Costs, Schedule, build, peak_in_flight, simulate

CLOSED_FORM = ("1f1b", "interleaved", "afab")


def rank_stages(parallel: Parallel) -> list[tuple[int, ...]]:
    """Model stages that each pipeline rank holds, in model order. DualPipe holds a stage of each direction."""
    stages = parallel.pp * parallel.vpp
    held: list[list[int]] = [[] for _ in range(parallel.pp)]
    for stage, rank in enumerate(SCHEDULES[parallel.schedule].place(parallel.pp, parallel.vpp)):
        held[rank].append(stage % stages)
    return [tuple(stages) for stages in held]


@lru_cache(maxsize=64)
def _schedule(name: str, pp: int, micro_batches: int, vpp: int) -> Schedule:
    return build(name, pp, micro_batches, vpp)


def _shortened(parallel: Parallel) -> Schedule:
    """The schedule with no more micro-batches than its warm-up, some steady state and its drain need."""
    enough = 4 * parallel.pp * parallel.vpp + 4
    return _schedule(parallel.schedule, parallel.pp, min(parallel.micro_batches, enough), parallel.vpp)


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

    Closed form for unequal stages: the slowest rank is busy for all m micro-batches and the first micro-batch must walk
    through the others: m*S_max + (sum(S) - S_max)/v, which for equal stages is the bubble ratio (p-1)/(v*m). A
    simulated schedule is run for a few micro-batches; each further one costs the slowest rank's time.
    """
    m = parallel.micro_batches
    work = rank_seconds(parallel, [f + b for f, b in zip(forward, backward, strict=True)])
    slowest = max(work)
    if parallel.schedule in CLOSED_FORM:
        span = m * slowest + (sum(work) - slowest) / parallel.vpp
    else:
        schedule = _shortened(parallel)
        half = tuple(seconds / 2 for seconds in backward)
        span = simulate(schedule, Costs(tuple(forward), half, half)).makespan
        span += (m - schedule.micro_batches) * slowest
    busy = m * sum(work)
    return span, (parallel.pp * span - busy) / busy


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
    return list(peak_in_flight(_shortened(parallel)))
