"""`orch twin`: runs ranks of a plan at full size without data, GPUs or peers, and compares them
with the plan."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.plan import Plan
    from orchestrator.plan.twin import RankRun
    from orchestrator.verify.twin import Compared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all",
        action="store_true",
        help="show every figure, not only the differing ones",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.session import home
    from orchestrator.config.compose import load
    from orchestrator.plan.exits import Exit
    from orchestrator.plan.twin import RankRun
    from orchestrator.planner.build import build_plan
    from orchestrator.submit.cluster import ClusterResolver
    from orchestrator.verify.twin import Compared, compare, evenly_chosen, ranks_to_run, shortened
    from orchestrator.verify.twin import run as run_twin

    config = load(overrides, args.config_dir)
    resolve = ClusterResolver(home())
    plan = build_plan(
        config,
        resolve(config.cluster),
        profile=resolve.profile(config),
    )
    _check_runnable(plan)
    micro_batches = plan.parallel.micro_batches
    plan = shortened(evenly_chosen(plan))
    ranks = ranks_to_run(plan)
    runs = list[RankRun]()
    figures = list[list[Compared]]()
    for rank_run in run_twin(plan, ranks):
        runs.append(rank_run)
        figures.append(compare(plan, rank_run))
        if sys.stderr.isatty():
            print(
                f"rank {rank_run.rank}: {len(runs)} of {len(ranks)}, {rank_run.seconds:.0f} s",
                file=sys.stderr,
            )
    if args.json:
        print(_json(plan, micro_batches, runs, figures))
    else:
        print(_page(plan, micro_batches, runs, figures, args.all))
    differing = any(figure.differs for rank in figures for figure in rank)
    return Exit.CONFIG if differing else Exit.DONE


def _check_runnable(plan: Plan) -> None:
    """Raises OrchError (65) for a plan that the twin cannot run."""
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.plan.offload import offload_of
    from orchestrator.plan.trained import refusal

    if problem := refusal(plan):
        raise OrchError(problem, Exit.CONFIG)
    offload = offload_of(plan.job.train)
    for key, target in (
        ("offload", offload.optimizer),
        ("offload_activations", offload.activations),
    ):
        if target == "disk":
            raise OrchError(
                f"train.{key}=disk: orch twin has no disk; legal: none, host", Exit.CONFIG
            )
    if offload.delayed:
        raise OrchError(
            "train.offload_delayed=true: orch twin runs one step, which has no delayed update",
            Exit.CONFIG,
        )


def _json(
    plan: Plan,
    micro_batches: int,
    runs: list[RankRun],
    figures: list[list[Compared]],
) -> str:
    import msgspec

    rows = [
        {
            **msgspec.to_builtins(run),
            "compared": [{**figure._asdict(), "differs": figure.differs} for figure in rank],
        }
        for run, rank in zip(runs, figures, strict=True)
    ]
    ran = {"micro_batches": plan.parallel.micro_batches, "of": micro_batches}
    return msgspec.json.encode({**ran, "ranks": rows}).decode()


def _page(
    plan: Plan,
    micro_batches: int,
    runs: list[RankRun],
    figures: list[list[Compared]],
    all_figures: bool,
) -> str:
    from orchestrator.style import si

    lines = []
    for run, rank in zip(runs, figures, strict=True):
        coord = plan.ranks[run.rank].coord
        lines.append(
            f"rank {run.rank} (pipeline rank {coord.pp} of {plan.parallel.pp}):"
            f" {len(run.sequence):,} transfers, peak {run.peak['total'] / 2**30:.1f} GiB; run in"
            f" {run.seconds:.1f} s and {run.process_bytes / 2**30:.1f} GiB"
        )
        for figure in rank:
            if figure.differs or all_figures:
                planned, measured = (
                    value if isinstance(value, str) else si(value, "B")
                    for value in (figure.planned, figure.found)
                )
                mark = "!" if figure.differs else " "
                deviation = f"{figure.off:+.1%}" if figure.off not in (0.0, float("inf")) else ""
                values = f"planned {planned:>10}  found {measured:>10}  {deviation}"
                lines.append(f"  {mark} {figure.what:<28} {values}")
    count = sum(figure.judged for rank in figures for figure in rank)
    differing = sum(figure.differs for rank in figures for figure in rank)
    lines.append(
        f"{differing} of {count} figures differ by more than 5% from the plan"
        if differing
        else f"all {count} figures are within 5% of the plan"
    )
    if plan.model.moe is not None:
        lines.append("all experts are chosen equally often, in this run and in the plan")
    if plan.parallel.micro_batches < micro_batches:
        lines.append(
            f"run with {plan.parallel.micro_batches} of {micro_batches} micro-batches per step:"
            " more of them need no more memory, and repeat the same transfers"
        )
    return "\n".join(lines)
