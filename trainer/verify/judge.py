"""Verifies cells: refuses unsupported plans, trains each reference once, forks the ranks of a cell
and compares.

Cells with the same number of ranks may share a launch; if it fails, each cell is run again on its
own, so that a bad cell does not change the verdicts of others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set

import msgspec
import torch

from orchestrator.plan import Plan
from orchestrator.plan.offload import offload_of
from orchestrator.plan.parity import ALONE, ALWAYS, HOPELESS, Cell, Errors, Verdict
from orchestrator.plan.rounding.wide import wide_patterns
from orchestrator.plan.schedules import shards_layers
from orchestrator.plan.trained import problems
from trainer.parallel import vocab
from trainer.precision import DTYPES

from . import alone, oracle
from .compare import STEPS, recipe_for, run_rank, with_eps
from .ranks import RankError, run_ranks

#: Seconds after which the ranks of a launch count as hung: for its first step, in which they touch
#: their memory, and per cell and precision. A cell takes a few seconds alone, but a crowded machine
#: is not a hang, and a launch that ends well does not wait.
START_S = 300.0
CELL_S = 60.0
#: A cell with compiled blocks may take this many times as long as any other.
COMPILED = 20
#: Logits per chunk of the loss: so few that a small model has several chunks, as a large model
#: does.
CHUNK = 1 << 11
#: Most ranks of a launch: a limit of the machine, not of layouts.
MOST_RANKS = 32

#: Results of single-process training, by everything that they depend on.
ReferenceRuns = dict[bytes, list[oracle.Outcome]]


def judge(
    cells: Sequence[Cell],
    precisions: Sequence[str] = ALWAYS,
    together: int = 1,
) -> Iterator[Verdict]:
    """Yields one verdict per cell, in order of completion. `together` is the number of cells per
    launch."""
    cache: ReferenceRuns = {}
    runnable: dict[int, list[Cell]] = {}
    for cell in cells:
        reason = next(problems(cell.plan), "")
        world = cell.plan.parallel.world_size
        if not reason and world > MOST_RANKS:
            reason = f"{world} ranks are too many to run on one machine (at most {MOST_RANKS})"
        if reason:
            yield Verdict(name=cell.name, note=cell.note, refused=reason)
        else:
            runnable.setdefault(world, []).append(cell)
    for world in sorted(runnable):
        cells_of_world = runnable[world]
        for first in range(0, len(cells_of_world), together):
            yield from _launch(cells_of_world[first : first + together], precisions, cache)


def _launch(
    cells: Sequence[Cell],
    precisions: Sequence[str],
    cache: ReferenceRuns,
) -> Iterator[Verdict]:
    start = time.monotonic()
    world = cells[0].plan.parallel.world_size
    pairs = [(cell, precision) for cell in cells for precision in _precisions(cell, precisions)]
    jobs = [_job(cell, precision, cache) for cell, precision in pairs]
    durations = [COMPILED if plan.job.train.compile else 1 for _, plan, *_ in jobs]
    timeout_s = START_S + CELL_S * sum(durations)
    try:
        ranks = run_ranks(_run_jobs, world, jobs, timeout=timeout_s)
    except RankError as error:
        if len(cells) > 1:
            for cell in cells:
                yield from _launch([cell], precisions, cache)
            return
        yield _broken(cells[0], str(error), time.monotonic() - start)
        return
    seconds = (time.monotonic() - start) / len(cells)
    for cell in cells:
        indices = {
            precision: index
            for index, (paired_cell, precision) in enumerate(pairs)
            if paired_cell is cell
        }
        errors = {
            precision: summary([rank[index] for rank in ranks], *_expected(jobs[index][2][0]))
            for precision, index in indices.items()
        }
        yield Verdict(
            name=cell.name,
            note=cell.note,
            errors=errors,
            seconds=round(seconds, 2),
        )


def _precisions(cell: Cell, precisions: Sequence[str]) -> list[str]:
    """Returns the precisions in which a cell is compared, as keys of LIMITS."""
    if cell.plan.job.matmul or cell.plan.job.optim.state:
        # In fp32 sums differ in their last digits between layouts, and such a digit may decide a
        # rounding to few bits, which is a million times as coarse. In fp64 it hardly ever does, and
        # a wrong scale is found just as well.
        precisions = [precision for precision in precisions if precision != "fp32"]
    if not cell.precision:
        return [*precisions]
    exact = [f"{cell.precision}{ALONE}"] if alone.rounds_as_one(cell.plan) else []
    return [*precisions, cell.precision, *exact]


def _job(cell: Cell, precision: str, cache: ReferenceRuns) -> tuple:
    """Returns (precision, plan, outcomes to compare with, packed, empty)."""
    plan = with_eps(cell.plan, precision)
    expected = reference_run(plan, cell.packed, cell.empty, precision, cache)
    return precision, plan, expected, cell.packed, cell.empty


def _run_jobs(rank: int, jobs: list[tuple]) -> list[dict[str, float]]:
    vocab.CHUNK = CHUNK  # in this forked rank alone
    return [
        run_rank(
            rank,
            plan,
            recipe_for(precision, plan),
            expected,
            packed,
            empty=empty,
        )
        for precision, plan, expected, packed, empty in jobs
    ]


def _broken(cell: Cell, traceback: str, seconds: float) -> Verdict:
    """Returns the verdict of a rank's traceback: refused if it ends in LayoutError, else failed."""
    last = traceback.strip().splitlines()[-1]
    kind, _, reason = last.partition(": ")
    if kind.endswith("LayoutError"):
        return Verdict(name=cell.name, note=cell.note, refused=reason)
    return Verdict(
        name=cell.name,
        note=cell.note,
        failed=last,
        seconds=round(seconds, 2),
    )


def _expected(outcome: oracle.Outcome) -> tuple[set[str], set[str]]:
    """Returns the names of the parameters and of the further quantities of an outcome."""
    extra_quantities = {f"term {name}" for name in outcome.terms} | {
        f"state {name}" for name in outcome.states
    }
    return set(outcome.grads), extra_quantities


def summary(
    ranks: Sequence[dict[str, float]],
    parameters: set[str],
    extra_quantities: Set[str] = frozenset(),
) -> Errors:
    """Returns the largest errors over all ranks. A quantity that no rank has compared counts as
    HOPELESS. `extra_quantities` names terms of the loss and states without gradient."""
    worst: dict[str, float] = {}
    for rank_errors in ranks:
        for quantity, error in rank_errors.items():
            worst[quantity] = max(worst.get(quantity, 0.0), min(error, HOPELESS))

    def of_all(kind: str) -> tuple[float, str]:
        return max((worst.get(f"{kind} {name}", HOPELESS), name) for name in parameters)

    grad_error, worst_grad = of_all("grad")
    weight_error, worst_weight = of_all("weight")
    extra_errors = ((worst.get(name, HOPELESS), name) for name in extra_quantities)
    extra_error, worst_extra = max(extra_errors, default=(0.0, ""))
    return Errors(
        loss=worst.get("loss", HOPELESS),
        grad=grad_error,
        norm=worst.get("norm", HOPELESS),
        weight=weight_error,
        more=extra_error,
        worst_grad=worst_grad,
        worst_weight=worst_weight,
        worst_more=worst_extra,
    )


def reference_run(
    plan: Plan,
    packed: bool,
    empty: bool,
    precision: str,
    cache: ReferenceRuns,
) -> list[oracle.Outcome]:
    """Returns the outcomes of training in one process, which do not depend on the layout; cells
    share them through `cache`."""
    train = plan.job.train
    par = plan.parallel
    # Initial weights, at least, are of the narrow precision.
    narrow = precision if precision.removesuffix(ALONE) in ("bf16", "fp16") else ""
    with_engine = narrow.endswith(ALONE)
    job_key = (
        plan.model,
        plan.job.optim,
        train.seed,
        train.seq_len,
        train.steps,
        train.clip_grad_norm,
        par.global_batch_samples,
        offload_of(train).delayed,
        packed,
        (empty or plan.job.matmul)
        and (
            plan.job.matmul,
            wide_patterns(train),
            par.micro_batch_size,
        ),
    )
    key = msgspec.json.encode(
        (
            job_key,
            narrow,
            _engine_key(plan) if with_engine else (),
        )
    )
    if key in cache:
        return cache[key]
    if with_engine:
        cache[key] = alone.train(
            plan,
            STEPS,
            packed,
            empty,
            recipe_for(precision, plan),
        )
    else:
        start = DTYPES[narrow] if narrow else torch.float64
        cache[key] = oracle.train(plan, STEPS, packed, empty, start)
    return cache[key]


def _engine_key(plan: Plan) -> tuple:
    """Returns what the result of our own engine in one process depends on, beside the job."""
    par = plan.parallel
    return (
        plan.job.train.grad_dtype,
        par.micro_batch_size,
        par.bucket_bytes,
        shards_layers(par),
        alone.shards_masters(plan),
    )
