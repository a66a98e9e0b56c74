"""Predictions for the rows of a table, by the planner's cost model, with axes nested in the default order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import structs

from orchestrator.plan.document import AXES
from orchestrator.planner.cost.compute import Rates
from orchestrator.planner.placement.axis_order import CostContext, solve

from .cells import RowError
from .job_memory import job_memory
from .rows import Job, read_row

GIB = 1 << 30
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


def predict(rows: Iterable[Mapping[str, str]]) -> Iterator[Prediction]:
    """A prediction for each row, in order. Rows on the same hardware share its paths."""
    contexts: dict[tuple[object, ...], CostContext] = {}
    for number, cells in enumerate(rows, 1):
        name = (cells.get("id") or "").strip() or str(number)
        try:
            job = read_row(cells)
            yield _one(name, job, contexts)
        except RowError as error:
            yield Prediction(name, None, None, None, f"error: row {number}: {error}", "")


def _one(name: str, job: Job, contexts: dict[tuple[object, ...], CostContext]) -> Prediction:
    par = job.parallel
    matmul = job.matmul or job.train.precision
    key = id(job.cluster), job.train.precision, matmul
    if key not in contexts:  # paths and rates depend on the cluster alone; the model is set for each row
        contexts[key] = CostContext(job.cluster, job.model, job.train)
        contexts[key].rate = _rate(contexts[key], matmul)
    context = contexts[key]
    context.model, context.train = job.model, job.train
    held = job_memory(job)
    solution = solve(context, par, AXES, held.train)
    tokens = par.global_batch_tokens / solution.time.step_s / par.world_size
    assumed = "; ".join([*job.assumed, *held.assumed])
    status = "ok" if held.fits else "oom"
    return Prediction(name, solution.time.step_s, tokens, held.peak_bytes / GIB, status, assumed)


def _rate(context: CostContext, matmul: str) -> Rates:
    """Rates of the 16-bit precision, with matrix products at that of `matmul`."""
    kind = matmul if matmul in context.cluster.gpu.peak_flops else "fp8"
    peak = context.cluster.gpu.peak_flops[kind]
    reached = context.profile.gemm.get(kind, context.profile.gemm_default)
    return structs.replace(context.rate, matmul=peak * reached)
