"""Rows of a table as observations: what was measured, and the cost model's prediction of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.plan.document import AXES
from orchestrator.planner.cost.dual import Number
from orchestrator.planner.cost.profile import shipped
from orchestrator.planner.cost.step_time import StepCost
from orchestrator.planner.cost.traffic import step_traffic
from orchestrator.planner.placement.axis_order import PathCache, candidates
from orchestrator.planner.predict.cells import RowError
from orchestrator.planner.predict.job_memory import job_memory
from orchestrator.planner.predict.predict import context_of
from orchestrator.planner.predict.rows import Job, read_row

from .fit import Observation


def observations(rows: Sequence[Mapping[str, str]]) -> list[Observation]:
    """Of the rows that have a step time and can be read."""
    paths: dict[int, PathCache] = {}
    found = []
    for number, cells in enumerate(rows, 1):
        try:
            measured = float(cells.get("step_time_s") or 0)
            job = read_row(cells)
        except (RowError, ValueError):
            continue
        name = cells.get("id") or str(number)
        if measured > 0:
            found.append(Observation(name, name.rpartition("-")[0] or "all", measured, prediction(job, paths)))
    return found


def prediction(job: Job, paths: dict[int, PathCache]) -> Callable[[Mapping[str, Number]], Number]:
    """A function from parameter values to the step in seconds."""
    context, par, train = context_of(job, paths, shipped()), job.parallel, job_memory(job).train
    traffic = step_traffic(context.model, par, train, context.software)
    work = context.work(par, train)
    cost = candidates(context.path_cache, par, traffic, work, AXES)[0]

    def step_s(values: Mapping[str, Number]) -> Number:
        return StepCost(context.work(par, train, context.rates(values)), cost.paths).step_s

    return step_s
