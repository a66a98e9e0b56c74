"""Lower bounds of the seconds per step."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cost.dual import value_of
from orchestrator.cost.memory.deferred_weight_gradients import SPLIT_BACKWARD
from orchestrator.cost.model.stages import rank_stages
from orchestrator.plan.schedules import splits_backward

from .communication import exposed_gradients
from .pipeline import EQUAL, weights_at_end
from .step_time import StepCost


def lower_bound_s(cost: StepCost) -> float:
    """Returns a lower bound of `cost.step_s` that needs no simulation."""
    ends = _rank_ends(cost)
    span = max(*ends, _chain_s(cost), _way_back_s(cost, ends))
    return _least_s(cost, span, value_of(cost.gradients))


def bound_over_paths_s(cost: StepCost, inner_known: bool) -> float:
    """Returns a lower bound of the step with any paths that are no cheaper than those of `cost`.

    A rank that takes longer hides more of its gradients. But if it takes longer than the span, so
    does the step. With `inner_known`, the paths of communication inside a stage are those of
    `cost`, so no rank takes longer.
    """
    rate = cost.work.rate
    par = cost.parallel
    software = cost.workload.software
    span = value_of(cost.span[0])
    longest = 0.0
    for sent, end, seconds in zip(cost.sent, _rank_ends(cost), cost.ranks, strict=True):
        slack = 0.0 if inner_known else max(0.0, span - end) / par.micro_batches
        exposed = exposed_gradients(sent, par, rate, software, seconds + slack)
        longest = max(longest, value_of(exposed))
    return _least_s(cost, span, longest)


def _least_s(cost: StepCost, span: float, gradients: float) -> float:
    """Returns a lower bound of the step from its span and its exposed gradients in seconds."""
    outside = gradients + value_of(cost.transfers) + value_of(cost.constant)
    return (span + outside) * value_of(cost.factor) * (1 - EQUAL)


def _rank_ends(cost: StepCost) -> list[float]:
    """Returns the least seconds that the schedule takes because of each pipeline rank.

    It waits until a micro-batch has passed the stages ahead of the rank, then does all of the
    rank's work. If backward is whole, the last gradient goes back through those stages.
    """
    m = cost.parallel.micro_batches
    if cost.never_idle:
        return [m * value_of(seconds) for seconds in cost.ranks]
    backward_is_whole = not splits_backward(cost.parallel)
    ahead = [0.0]
    total = 0.0
    for forward, backward in cost.stages:
        total += value_of(forward) + (value_of(backward) if backward_is_whole else 0.0)
        ahead.append(total)
    firsts = map(min, rank_stages(cost.parallel))
    return [
        ahead[first] + m * value_of(seconds)
        for first, seconds in zip(firsts, cost.ranks, strict=True)
    ]


def _chain_s(cost: StepCost) -> float:
    """Returns the seconds of one micro-batch through all stages and back.

    Of a split backward, only the first half counts.
    """
    if cost.never_idle:
        return 0.0
    back = 0.5 if splits_backward(cost.parallel) else 1.0
    return sum(value_of(forward) + back * value_of(backward) for forward, backward in cost.stages)


def _way_back_s(cost: StepCost, ends: Sequence[float]) -> float:
    """Returns the seconds until the last gradient has gone back through the stages ahead.

    It is that of the rank with most stages ahead of it, if backward is split. Meanwhile the rank
    has weight gradients left to compute. `ends` is the result of `_rank_ends`.
    """
    par = cost.parallel
    if cost.never_idle or par.schedule not in SPLIT_BACKWARD:
        return 0.0
    held = rank_stages(par)
    rank = max(range(par.pp), key=lambda rank: min(held[rank]))
    half = [value_of(backward) / 2 for _, backward in cost.stages]
    ahead = sum(half[: min(held[rank])])
    deferred_weights = weights_at_end(par.schedule, par.pp, par.micro_batches, par.vpp, rank)
    longest_weights = max(half[stage] for stage in held[rank])
    return ends[rank] + ahead - deferred_weights * longest_weights
