"""The cost of an existing plan: its terms, and its pipeline over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET, structs

from orchestrator.cost.time.imbalance import spread_name
from orchestrator.cost.time.step_time import StepCost
from orchestrator.cost.time.traffic import step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.plan import Plan
from orchestrator.plan.document import Cluster, Parallel, Train
from orchestrator.plan.expert_mesh import expert_mesh, fullest
from orchestrator.plan.interval import SIGMAS
from orchestrator.plan.schedules import TABLE, Costs, Timeline, schedule_of, simulate

from .context import CostContext
from .dual import Number, duals, log_gradient, value_of
from .nesting import Candidate, candidates
from .parameters import INDEX
from .profile import Profile, with_values
from .software import SOFTWARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .numpy_import import np


def context_of(
    plan: Plan,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
) -> CostContext:
    """Returns the cost context in which a plan was made.

    Another profile or cluster replaces the plan's, if given.
    """
    plan_profile = with_values(plan.time.parameters)
    return CostContext(
        cluster or plan.cluster,
        plan.model,
        plan.job.train,
        matmul=plan.job.matmul,
        software=SOFTWARE.get(plan.time.software, SOFTWARE["orch"]),
        profile=profile or plan_profile,
        assumed=plan_profile.values,
        state=plan.job.optim.state or "",
        isolated=plan.job.data.isolate_documents,
    )


def jacobian(
    context: CostContext,
    candidate: Candidate,
    parallel: Parallel,
    train: Train,
) -> NDArray[np.float64]:
    """Returns d ln(step) / d ln(parameter) of a costed layout, float [parameters]."""
    rate = context.rates(duals(context.profile.values))
    work = context.work(parallel, train, rate)
    return log_gradient(StepCost(work, candidate.paths).step_s)


def step_of(
    plan: Plan, context: CostContext | None = None
) -> Callable[[Mapping[str, Number]], Number]:
    """Returns a function from values of the parameters to the plan's seconds per step."""
    cost_context = context or context_of(plan)
    par = plan.parallel
    train = plan.job.train
    paths = cost_of(plan, cost_context).paths

    def step_s(values: Mapping[str, Number]) -> Number:
        """Returns the seconds per step at these values of the parameters."""
        work = cost_context.work(par, train, cost_context.rates(values))
        return StepCost(work, paths).step_s

    return step_s


def cost_of(plan: Plan, context: CostContext | None = None) -> StepCost:
    """Returns the cost of the plan's step in its own nesting order."""
    context = context or context_of(plan)
    traffic = step_traffic(Workload(plan.model, plan.parallel, plan.job.train, context.software))
    work = context.work(plan.parallel, plan.job.train)
    return candidates(context.path_cache, plan.parallel, traffic, work, plan.parallel.order)[0].cost


class ExpertLoad(NamedTuple):
    """The load of the fullest rank that shares experts over the mean, as a plan assumes it."""

    factor: float
    low: float  # lower end of the 95 % interval
    high: float  # upper end of the 95 % interval
    balanced_by: str  # "bias", "loss" or "none"
    costs_s: float  # seconds per step, compared with even loads


def expert_load(plan: Plan) -> ExpertLoad | None:
    """Returns the assumed load of the experts' ranks, or None if no ranks share experts."""
    moe = plan.model.moe
    par = plan.parallel
    if moe is None or (ep := expert_mesh(par).ep) == 1:
        return None
    factor = fullest(par)
    name = spread_name(moe)
    context = context_of(plan)
    variance = float(context.profile.uncertainty[INDEX[name], INDEX[name]])
    margin = SIGMAS * variance**0.5
    limit = min(ep, moe.experts / moe.top_k)
    low, high = (min(limit, 1.0 + (factor - 1.0) * exp(sign * margin)) for sign in (-1, 1))
    even = structs.replace(plan, parallel=structs.replace(par, expert_imbalance=UNSET))
    uneven_s = value_of(cost_of(plan, context).step_s)
    even_s = value_of(cost_of(even, context).step_s)
    return ExpertLoad(
        factor=factor,
        low=low,
        high=high,
        balanced_by=name.rpartition(".")[2],
        costs_s=uneven_s - even_s,
    )


def pipeline_timeline(plan: Plan, most_micro_batches: int = 16) -> Timeline:
    """Returns the simulated pipeline of a plan.

    It has the start and end in seconds of every action of the first micro-batches.
    """
    cost = cost_of(plan)
    par = plan.parallel
    forward = tuple(value_of(stage[0]) for stage in cost.stages)
    half = tuple(value_of(stage[1]) / 2 for stage in cost.stages)
    shown = None if par.schedule == TABLE else min(par.micro_batches, most_micro_batches)
    return simulate(schedule_of(par, shown), Costs(forward, half, half))
