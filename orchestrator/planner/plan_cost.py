"""The cost of a plan that is there already: its terms again, and its pipeline over time."""

from __future__ import annotations

from orchestrator.plan import Plan
from orchestrator.plan.schedules import TABLE, Costs, Timeline, schedule_of, simulate

from .cost.dual import value_of
from .cost.profile import SHIPPED, Profile
from .cost.software import SOFTWARE
from .cost.step_time import StepCost
from .cost.traffic import step_traffic
from .placement.axis_order import CostContext, candidates


def context_of(plan: Plan, profile: Profile = SHIPPED) -> CostContext:
    """The cost context that a plan was made in, with another profile where one is given."""
    software = SOFTWARE.get(plan.time.software, SOFTWARE["orch"])
    return CostContext(
        plan.cluster, plan.model, plan.job.train, matmul=plan.job.matmul, software=software, profile=profile
    )


def cost_of(plan: Plan, context: CostContext | None = None) -> StepCost:
    """The plan's step in its own nesting order."""
    context = context or context_of(plan)
    traffic = step_traffic(plan.model, plan.parallel, plan.job.train, context.software)
    work = context.work(plan.parallel, plan.job.train)
    return candidates(context.path_cache, plan.parallel, traffic, work, plan.parallel.order)[0].cost


def pipeline_timeline(plan: Plan, most_micro_batches: int = 16) -> Timeline:
    """The pipeline of a plan, simulated: start and end in seconds of every action of its first micro-batches."""
    cost, par = cost_of(plan), plan.parallel
    forward = tuple(value_of(stage[0]) for stage in cost.stages)
    half = tuple(value_of(stage[1]) / 2 for stage in cost.stages)
    shown = None if par.schedule == TABLE else min(par.micro_batches, most_micro_batches)
    return simulate(schedule_of(par, shown), Costs(forward, half, half))
