"""Verifies cells: refuses unsupported plans, trains each reference once, forks the ranks of a cell
and compares.

Cells with the same number of ranks may share a launch; if it fails, each is run again alone, so
that a bad cell does not change the verdicts of others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set

import msgspec
import torch

from orchestrator.plan import Plan
from orchestrator.plan.offload import offload_of
from orchestrator.plan.parity import ALONE, ALWAYS, HOPELESS, Cell, Errors, Verdict
from orchestrator.plan.trained import problems
from trainer.parallel import vocab
from trainer.precision import DTYPES

from . import alone, oracle
from .compare import STEPS, recipe_for, run_rank, with_eps
from .ranks import RankError, run_ranks

#: Seconds after which the ranks of a launch are considered hung: for its first step, when they
#: touch their memory, and per cell and precision. A cell takes a few seconds alone, but a crowded
#: machine is no hang, and a launch that ends well costs nothing of this.
START_S = 300.0
CELL_S = 60.0
#: Times as long as any other that a cell with compiled blocks takes.
COMPILED = 20
#: Logits that the loss takes at a time: so few that a small model has several chunks, as a large
#: one does.
CHUNK = 1 << 11
#: Most ranks of a launch: a limit of the machine, not of layouts.
MOST_RANKS = 32

#: Results of single-process training, by everything that they depend on.
ReferenceRuns = dict[bytes, list[oracle.Outcome]]


def judge(
    cells: Sequence[Cell], precisions: Sequence[str] = ALWAYS, together: int = 1
) -> Iterator[Verdict]:
    """One verdict per cell, in order of completion; `together`: cells per launch."""
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
        of_size = runnable[world]
        for first in range(0, len(of_size), together):
            yield from _launch(of_size[first : first + together], precisions, cache)


def _launch(
    cells: Sequence[Cell], precisions: Sequence[str], cache: ReferenceRuns
) -> Iterator[Verdict]:
    start = time.monotonic()
    world = cells[0].plan.parallel.world_size
    ways = [(cell, precision) for cell in cells for precision in _precisions(cell, precisions)]
    jobs = [_job(cell, precision, cache) for cell, precision in ways]
    timeout_s = START_S + CELL_S * sum(
        COMPILED if plan.job.train.compile else 1 for _, plan, *_ in jobs
    )
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
        mine = {precision: at for at, (one, precision) in enumerate(ways) if one is cell}
        errors = {
            precision: summary([rank[at] for rank in ranks], *_expected(jobs[at][2][0]))
            for precision, at in mine.items()
        }
        yield Verdict(name=cell.name, note=cell.note, errors=errors, seconds=round(seconds, 2))


def _precisions(cell: Cell, precisions: Sequence[str]) -> list[str]:
    """What one cell is compared in, keys of LIMITS."""
    if cell.plan.job.matmul or cell.plan.job.optim.state:
        # In fp32 sums differ in their last digits between layouts, and each digit may decide a
        # rounding to few bits, which is a million times as coarse. In fp64 none does, and a wrong
        # scale is as wrong.
        precisions = [one for one in precisions if one != "fp32"]
    if not cell.precision:
        return [*precisions]
    exact = [f"{cell.precision}{ALONE}"] if alone.rounds_as_one(cell.plan) else []
    return [*precisions, cell.precision, *exact]


def _job(cell: Cell, precision: str, cache: ReferenceRuns) -> tuple:
    """(precision, plan, outcomes to compare with, packed, empty)."""
    plan = with_eps(cell.plan, precision)
    return (
        precision,
        plan,
        reference_run(plan, cell.packed, cell.empty, precision, cache),
        cell.packed,
        cell.empty,
    )


def _run_jobs(rank: int, jobs: list[tuple]) -> list[dict[str, float]]:
    vocab.CHUNK = CHUNK  # in this forked rank alone
    return [
        run_rank(rank, plan, recipe_for(precision, plan), expected, packed, empty=empty)
        for precision, plan, expected, packed, empty in jobs
    ]


def _broken(cell: Cell, text: str, seconds: float) -> Verdict:
    """The verdict of a rank's traceback: refused if it ends in LayoutError, else failed."""
    last = text.strip().splitlines()[-1]
    kind, _, reason = last.partition(": ")
    if kind.endswith("LayoutError"):
        return Verdict(name=cell.name, note=cell.note, refused=reason)
    return Verdict(name=cell.name, note=cell.note, failed=last, seconds=round(seconds, 2))


def _expected(outcome: oracle.Outcome) -> tuple[set[str], set[str]]:
    more = {f"term {name}" for name in outcome.terms} | {f"state {name}" for name in outcome.states}
    return set(outcome.grads), more


def summary(
    ranks: Sequence[dict[str, float]], parameters: set[str], more: Set[str] = frozenset()
) -> Errors:
    """The largest errors over all ranks. A quantity that no rank has compared counts as HOPELESS;
    `more`: which there are beside the usual ones."""
    worst: dict[str, float] = {}
    for found in ranks:
        for what, error in found.items():
            worst[what] = max(worst.get(what, 0.0), min(error, HOPELESS))

    def of_all(kind: str) -> tuple[float, str]:
        return max((worst.get(f"{kind} {name}", HOPELESS), name) for name in parameters)

    (grad, worst_grad), (weight, worst_weight) = of_all("grad"), of_all("weight")
    loss = worst.get("loss", HOPELESS)
    norm = worst.get("norm", HOPELESS)
    worst_more, worst_name = max(
        ((worst.get(name, HOPELESS), name) for name in more), default=(0.0, "")
    )
    named = {"worst_grad": worst_grad, "worst_weight": worst_weight, "worst_more": worst_name}
    return Errors(loss=loss, grad=grad, norm=norm, weight=weight, more=worst_more, **named)


def reference_run(
    plan: Plan, packed: bool, empty: bool, precision: str, cache: ReferenceRuns
) -> list[oracle.Outcome]:
    """Training in one process, which does not depend on the layout; cells share results through
    `cache`."""
    train = plan.job.train
    par = plan.parallel
    narrow = (
        precision if precision.removesuffix(ALONE) in ("bf16", "fp16") else ""
    )  # of initial weights, at least
    engine = (
        (
            train.grad_dtype,
            par.micro_batch_size,
            par.bucket_bytes,
            par.zero == 3,
            alone.shards_masters(plan),
        )
        if narrow.endswith(ALONE)
        else ()
    )
    same = (
        plan.model,
        plan.job.optim,
        train.seed,
        train.seq_len,
        train.steps,
        train.clip_grad_norm,
        narrow,
        engine,
    )
    text = (
        par.global_batch_samples,
        offload_of(train).delayed,
        packed,
        (empty or plan.job.matmul) and (plan.job.matmul, par.micro_batch_size),
    )
    key = msgspec.json.encode((same, text))
    if key not in cache and engine:
        cache[key] = alone.train(plan, STEPS, packed, empty, recipe_for(precision, plan))
    elif key not in cache:
        cache[key] = oracle.train(
            plan, STEPS, packed, empty, DTYPES[narrow] if narrow else torch.float64
        )
    return cache[key]
