"""Predicts the rows of a table by the planner's cost model, with axes nested in the default
order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from orchestrator.cost.context import CostContext
from orchestrator.cost.dual import Number, duals, log_gradient, value_of
from orchestrator.cost.nesting import candidates
from orchestrator.cost.path_cache import PathCache
from orchestrator.cost.profile import Profile, relative_sd, shipped
from orchestrator.cost.time.traffic import step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import AXES, Train
from orchestrator.plan.interval import interval

from .cells import RowError
from .job_memory import job_memory
from .rows import Job, read_row, row_id

GIB = 1 << 30
#: The most clusters whose paths are kept; a table of a million rows may name as many clusters.
MOST_CLUSTERS = 1024
#: Columns of the bounds of the 95 % intervals.
INTERVALS = ("step_time_low_s", "step_time_high_s", "peak_mem_low_gib", "peak_mem_high_gib")
COLUMNS = (
    "id",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "peak_mem_gib",
    "status",
    "assumed",
    *INTERVALS,
)


class Prediction(NamedTuple):
    """One row of the predictions. `status` is "ok", "oom" or "error: row <number>: <column and
    reason>"; with an error the numbers are empty."""

    id: str
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    peak_mem_gib: float | None
    status: str
    assumed: str
    step_sd: float = 0.0  # Standard deviation of the logarithm of the step.
    mem_sd: float = 0.0

    def cells(self) -> list[str]:
        """Returns the cells under `COLUMNS`."""
        step = _interval(self.step_time_s, self.step_sd)
        peak = _interval(self.peak_mem_gib, self.mem_sd)
        cells = (*self[:6], *step, *peak)
        return [f"{value:.6g}" if isinstance(value, float) else (value or "") for value in cells]


def _interval(value: float | None, sd: float) -> tuple[float | None, float | None]:
    return interval(value, sd) if value and sd else (None, None)


def predict(
    rows: Iterable[Mapping[str, str]], profile: Profile | None = None
) -> Iterator[Prediction]:
    """Yields a prediction for each row, in order. Rows on the same hardware share its paths."""
    paths: dict[int, PathCache] = {}
    profile = profile or shipped()
    numbers = duals(profile.values)
    for number, cells in enumerate(rows, 1):
        name = row_id(cells) or str(number)
        try:
            yield _prediction(name, read_row(cells), paths, profile, numbers)
        except RowError as error:
            yield _refusal(name, f"error: row {number}: {error}")


def _refusal(name: str, status: str) -> Prediction:
    return Prediction(
        id=name,
        step_time_s=None,
        tokens_per_s_per_gpu=None,
        peak_mem_gib=None,
        status=status,
        assumed="",
    )


def _prediction(
    name: str,
    job: Job,
    paths: dict[int, PathCache],
    profile: Profile,
    numbers: Mapping[str, Number],
) -> Prediction:
    memory = job_memory(job)
    step = step_of(job, memory.train, paths)(numbers)
    step_s = value_of(step)
    tokens_per_s = job.parallel.global_batch_tokens / step_s
    return Prediction(
        id=name,
        step_time_s=step_s,
        tokens_per_s_per_gpu=tokens_per_s / job.parallel.world_size,
        peak_mem_gib=memory.peak_bytes / GIB,
        status="ok" if memory.fits else "oom",
        assumed="; ".join([*job.assumed, *memory.assumed]),
        step_sd=relative_sd(log_gradient(step), profile),
        mem_sd=memory.worst.sd,
    )


def step_of(
    job: Job,
    train: Train,
    paths: dict[int, PathCache],
) -> Callable[[Mapping[str, Number]], Number]:
    """Returns a function from values of the cost model's parameters to the row's step in seconds.
    `train` has the recomputation that `job_memory` found."""
    context = context_of(job, paths)
    parallel = job.parallel
    traffic = step_traffic(Workload(job.model, parallel, train, job.software))

    def step_s(values: Mapping[str, Number]) -> Number:
        work = context.work(parallel, train, context.rates(values))
        return candidates(context.path_cache, parallel, traffic, work, AXES)[0].cost.step_s

    return step_s


def context_of(
    job: Job,
    paths: dict[int, PathCache],
    profile: Profile | None = None,
) -> CostContext:
    """Returns the cost context of a row. Rows share clusters and the paths on them."""
    path_cache = paths.get(id(job.cluster))
    if path_cache is None:
        if len(paths) >= MOST_CLUSTERS:
            paths.clear()
        path_cache = paths[id(job.cluster)] = PathCache(job.cluster)
    return CostContext(
        job.cluster,
        job.model,
        job.train,
        path_cache,
        matmul=job.matmul,
        software=job.software,
        profile=profile,
        task=job.task,
        slow_fabric=job.slow_fabric,
    )
