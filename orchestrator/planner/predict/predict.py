"""Predictions for the rows of a table, by the planner's cost model, with axes nested in the default order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from orchestrator.plan.document import AXES
from orchestrator.planner.cost.profile import Profile, shipped
from orchestrator.planner.placement.axis_order import CostContext, PathCache, solve

from .cells import RowError
from .job_memory import job_memory
from .rows import Job, read_row

GIB = 1 << 30
MOST_CLUSTERS = 1024  # whose paths are kept; a table of a million rows may name as many
COLUMNS = ("id", "step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib", "status", "assumed")


class Prediction(NamedTuple):
    """One row of the result. `status`: ok, oom, or "error: row <number>: <column and why>", the numbers left empty."""

    id: str
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    peak_mem_gib: float | None
    status: str
    assumed: str

    def cells(self) -> list[str]:
        return [f"{value:.6g}" if isinstance(value, float) else (value or "") for value in self]


def predict(rows: Iterable[Mapping[str, str]], profile: Profile | None = None) -> Iterator[Prediction]:
    """A prediction for each row, in order. Rows on the same hardware share its paths."""
    paths: dict[int, PathCache] = {}
    profile = profile or shipped()
    for number, cells in enumerate(rows, 1):
        name = (cells.get("id") or "").strip() or str(number)
        try:
            job = read_row(cells)
            yield _one(name, job, paths, profile)
        except RowError as error:
            yield Prediction(name, None, None, None, f"error: row {number}: {error}", "")


def _one(name: str, job: Job, paths: dict[int, PathCache], profile: Profile) -> Prediction:
    par = job.parallel
    context, held = context_of(job, paths, profile), job_memory(job)
    solution = solve(context, par, AXES, held.train)
    tokens = par.global_batch_tokens / solution.time.step_s / par.world_size
    assumed = "; ".join([*job.assumed, *held.assumed])
    status = "ok" if held.fits else "oom"
    return Prediction(name, solution.time.step_s, tokens, held.peak_bytes / GIB, status, assumed)


def context_of(job: Job, paths: dict[int, PathCache], profile: Profile) -> CostContext:
    """The cost context of a row. Clusters are shared between rows, and so are the paths on them."""
    cache = paths.get(id(job.cluster))
    if cache is None:
        if len(paths) >= MOST_CLUSTERS:
            paths.clear()
        cache = paths[id(job.cluster)] = PathCache(job.cluster)
    named: dict[str, Any] = {"matmul": job.matmul, "software": job.software, "profile": profile}
    named |= {"task": job.task, "slow_fabric": job.slow_fabric}
    return CostContext(job.cluster, job.model, job.train, cache, **named)
