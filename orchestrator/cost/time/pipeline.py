"""Pipeline schedules: the seconds that a step spans, and micro-batches in flight on each rank.

Schedules and their simulator live in `orchestrator.plan.schedules`; the trainer executes the same
data. Closed forms are used if they are exact (Narayanan et al. 2021, arXiv 2104.04473, section
2.2); everything else is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

from orchestrator.cost.dual import Number, value_of
from orchestrator.cost.model.stages import rank_stages
from orchestrator.plan.document import Parallel
from orchestrator.plan.schedules import (
    SCHEDULES,
    TABLE,
    Costs,
    Kind,
    build,
    peak_in_flight,
    schedule_of,
    simulate,
)
from orchestrator.plan.schedules.makespan import Steps
from orchestrator.plan.schedules.turns import TURNS, makespan

CLOSED_FORM = ("1f1b", "interleaved", "afab")
EQUAL = 1e-6  # relative difference below which stages count as equal


@lru_cache(maxsize=256)
def _steps(name: str, pp: int, micro_batches: int, vpp: int) -> Steps:
    """Returns the dependencies of a schedule, ready to simulate."""
    # Both directions take equally long, so half of the ranks is enough.
    if name == "dualpipe":
        return _steps("dualpipev", pp // 2, micro_batches // 2, 2)
    return Steps(build(name, pp, micro_batches, vpp))


def rank_seconds(parallel: Parallel, stages: Sequence[Number]) -> list[Number]:
    """Returns the seconds of one micro-batch on each pipeline rank.

    `stages` has the seconds of each model stage. A bidirectional schedule holds the model twice and
    sends half of the micro-batches each way.
    """
    held = rank_stages(parallel)
    copies = sum(map(len, held)) // len(stages)
    return [sum(stages[stage] for stage in stages_of_rank) / copies for stages_of_rank in held]


def span_seconds(
    parallel: Parallel,
    forward: Sequence[float],
    backward: Sequence[float],
) -> tuple[float, float]:
    """Returns (seconds from first forward to last backward, idle / busy time over all ranks).

    `forward` and `backward` have the seconds of one micro-batch through each model stage,
    communication inside the stage included.

    With equal stages, 1F1B, interleaved 1F1B and all-forward-all-backward idle (p-1)/(v*m) of the
    busy time. Everything else is simulated for a few rounds of p micro-batches; each further round
    takes as long as the last one.
    """
    stage_seconds = [f + b for f, b in zip(forward, backward, strict=True)]
    work = [value_of(seconds) for seconds in rank_seconds(parallel, stage_seconds)]
    busy = parallel.micro_batches * sum(work)
    if parallel.schedule in CLOSED_FORM and max(work) <= min(work) * (1 + EQUAL):
        ratio = (parallel.pp - 1) / (parallel.vpp * parallel.micro_batches)
        return busy * (1 + ratio) / parallel.pp, ratio
    if parallel.schedule == TABLE:
        half = tuple(seconds / 2 for seconds in backward)
        span = simulate(schedule_of(parallel), Costs(tuple(forward), half, half)).makespan
    else:
        names = (
            parallel.schedule,
            parallel.pp,
            parallel.micro_batches,
            parallel.vpp,
        )
        span = _simulated_span(
            *names,
            tuple(forward),
            tuple(backward),
            max(work),
        )
    return span, (parallel.pp * span - busy) / busy


@lru_cache(maxsize=4096)
def _simulated_span(
    name: str,
    pp: int,
    micro_batches: int,
    vpp: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    slowest: float,
) -> float:
    """Returns the simulated span in seconds, extrapolated from a few rounds of micro-batches."""
    half = tuple(seconds / 2 for seconds in backward)  # input and weight gradient

    def simulated(count: int) -> float:
        """Returns the simulated seconds of `count` micro-batches."""
        if name in TURNS:
            return makespan(name, (pp, count, vpp), forward, half, half)
        return _steps(name, pp, count, vpp).makespan(forward, half, half)

    first = 3 * pp + micro_batches % pp  # warm-up, some steady state, drain
    if micro_batches <= first + pp:
        return simulated(micro_batches)
    longer = simulated(first + pp)
    per_micro_batch = (longer - simulated(first)) / pp
    return longer + (micro_batches - first - pp) * max(per_micro_batch, slowest)


@lru_cache(maxsize=4096)
def weights_at_end(
    name: str,
    pp: int,
    micro_batches: int,
    vpp: int,
    rank: int,
) -> int:
    """Returns the weight gradients that follow the last backward of a rank in a schedule.

    That backward belongs to the rank's first stage. The result is cached: behind a full pipeline,
    further micro-batches change nothing.
    """
    simulated = min(micro_batches, 2 * pp + micro_batches % 2)
    order = [*SCHEDULES[name].order(rank, pp, simulated, vpp)]
    return sum(1 for _ in takewhile(lambda action: action.kind is Kind.W, reversed(order)))


def in_flight(parallel: Parallel) -> list[int]:
    """Returns the peak number of micro-batches whose activations each rank holds.

    A micro-batch counts once per virtual stage that it has passed.
    """
    if parallel.schedule == TABLE:
        return [int(count) for count in peak_in_flight(schedule_of(parallel))]
    p = parallel.pp
    v = parallel.vpp
    m = parallel.micro_batches
    return [in_flight_on_rank(parallel.schedule, p, v, m, rank) for rank in range(p)]


def in_flight_on_rank(
    schedule: str,
    p: int,
    v: int,
    m: int,
    rank: int,
) -> int:
    """Returns `in_flight` of one rank in closed form; a test compares it with the schedule itself.

    1F1B: p - r. Interleaved: its warm-up of 2(p-r-1) + (v-1)p and one more (arXiv 2104.04473,
    section 2.2). ZB-H1: p; ZB-H2: 2p - 1; ZB-V: 2p half stages (arXiv 2401.10241). DualPipe: p + 1;
    DualPipeV: 2p + 1 half stages (arXiv 2412.19437). The number of micro-batches limits all of
    them. All-forward-all-backward: all micro-batches.
    """
    if schedule == "afab":
        return m * v
    if schedule == "1f1b":
        return min(m, p - rank)
    if schedule == "interleaved":
        return min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)
    if schedule in ("zb_h1", "zb_h2"):
        return min(m, p if schedule == "zb_h1" else 2 * p - 1)
    if schedule in ("zbv", "dualpipev"):
        return min(2 * p + (schedule == "dualpipev"), m + 1 + rank, 2 * m)
    if schedule == "dualpipe":
        return min(p + 1, m // 2 + 1 + min(rank, p - 1 - rank), m)
    return int(peak_in_flight(build(schedule, p, m, v))[rank])
