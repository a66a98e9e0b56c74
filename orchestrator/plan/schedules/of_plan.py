"""Builds the schedule of a plan: a named one, or the user's own table in the plan."""

from __future__ import annotations

from orchestrator.plan.document import TABLE, Parallel, Plan
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.flops import (
    attention_core_flops,
    attention_weights,
    head_weights,
    mlp_weights,
    prediction_blocks,
    prediction_weights,
)

from .actions import ScheduleError
from .registry import SCHEDULES, build
from .schedule import Schedule
from .simulate import Costs
from .table import read_rows

#: Schedules that do not split the backward pass.
WHOLE_BACKWARD = ("afab", "1f1b", "interleaved")


def schedule_of(parallel: Parallel, micro_batches: int | None = None) -> Schedule:
    """Builds the plan's schedule for `micro_batches` (None: the plan's own number).

    Raises ScheduleError if the numbers do not fit; a table fits one number of each.
    """
    micro_batches = micro_batches or parallel.micro_batches
    if parallel.schedule != TABLE:
        return build(parallel.schedule, parallel.pp, micro_batches, parallel.vpp)
    schedule = read_rows(parallel.schedule_rows)
    numbers = [
        ("pp", schedule.pp, parallel.pp),
        ("vpp", schedule.vpp, parallel.vpp),
        ("micro_batches", schedule.micro_batches, micro_batches),
    ]
    for name, table_number, plan_number in numbers:
        if table_number != plan_number:
            raise ScheduleError(
                f"the schedule table is for {name}={table_number}, the plan has"
                f" {name}={plan_number}"
            )
    return schedule


def splits_backward(parallel: Parallel) -> bool:
    """Reports whether backward is split: inputs' gradients first, weights' gradients later."""
    if parallel.schedule == TABLE:
        return schedule_of(parallel).splits_backward
    return parallel.schedule not in WHOLE_BACKWARD


def shards_layers(parallel: Parallel) -> bool:
    """Reports whether ZeRO-3 gathers by layer, with torch's `fully_shard`.

    That does not take a split backward. Then weights are gathered by bucket, when a step starts.
    """
    return parallel.zero == 3 and not splits_backward(parallel)


def copies_of(parallel: Parallel) -> int:
    """The number of model copies on one pipeline: 2 for a bidirectional schedule. Builds no
    schedule."""
    return copies(parallel.schedule, parallel.pp, parallel.vpp)


def copies(schedule: str, pp: int, vpp: int) -> int:
    if schedule not in SCHEDULES:
        return 1
    return len(SCHEDULES[schedule].place(pp, vpp)) // (pp * vpp)


def runs_pairs(parallel: Parallel) -> bool:
    """Checks whether a forward and the next backward run as one, so that each hides the other's
    communication: DualPipe, if layers communicate."""
    inside = parallel.tp > 1 or parallel.cp > 1 or expert_mesh(parallel).ep > 1
    return parallel.schedule in ("dualpipe", "dualpipev") and inside


def costs_of(plan: Plan) -> Costs:
    """The costs of the plan's stages in FLOPs per token: layers, the head on the last stage, and
    recomputed work. They decide the order of transfers, for which only the ratios matter."""
    model = plan.model
    train = plan.job.train
    core = attention_core_flops(model, train.seq_len) / model.layers
    layers = [
        2.0 * (attention_weights(model) + mlp_weights(model, at)) + core
        for at in range(model.layers)
    ]
    forward = list[float]()
    first = 0
    for count in plan.parallel.stage_layers:
        forward.append(sum(layers[first : first + count]) + 1.0)  # never zero
        first += count
    ahead = prediction_blocks(model)
    forward[-1] += ahead * layers[-1]
    recomputed = [cost if train.recompute == "full" else 0.0 for cost in forward]
    forward[-1] += 2.0 * head_weights(model) + ahead * 2.0 * prediction_weights(model)
    inputs = tuple(cost + repeated for cost, repeated in zip(forward, recomputed, strict=True))
    together = None
    if runs_pairs(plan.parallel):
        together = max(forward) + max(
            cost + weight for cost, weight in zip(inputs, forward, strict=True)
        )
    return Costs(tuple(forward), inputs, tuple(forward), together=together)
