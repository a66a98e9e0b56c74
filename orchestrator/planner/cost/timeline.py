"""The pipeline of a finished plan, simulated with its own stage times: what a plot draws."""

from __future__ import annotations

from orchestrator.plan import Plan
from orchestrator.plan.schedules import TABLE, Costs, Timeline, schedule_of, simulate

from .compute import rates
from .profile import profile_of
from .step_time import step_work


def timeline(plan: Plan, most_micro_batches: int = 16) -> Timeline:
    """Start and end of every action of the first `most_micro_batches` micro-batches of a step, in seconds."""
    par, train = plan.parallel, plan.job.train
    rate = rates(plan.cluster, profile_of(plan.cluster), train.precision)
    work = step_work(plan.model, par, train, rate)
    exposed = plan.time.exposed_comm_s
    inner = sum(exposed.get(axis, 0.0) for axis in ("tp", "cp", "ep")) / par.micro_batches / par.vpp
    forward = tuple(stage.forward + inner / 3 for stage in work.stages)
    half = tuple((stage.backward + inner * 2 / 3) / 2 for stage in work.stages)
    shown = None if par.schedule == TABLE else min(par.micro_batches, most_micro_batches)
    return simulate(schedule_of(par, shown), Costs(forward, half, half))
