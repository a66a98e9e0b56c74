"""`orch precision [run | key=value ...]`: measures the error of every linear in 8 bits on real
batches, and proposes which should stay wide."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.plan import Plan
    from orchestrator.plan.rounding.measurement import Measurement

MOST_BATCHES = 64
RECIPES = ("fp8_tensor", "fp8_delayed", "fp8_block")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one: its newest checkpoint and its own data"
        " (default: the newest run, or a new model of the given configuration)",
    )
    parser.add_argument(
        "--matmul",
        choices=RECIPES,
        help="measure this recipe (default: train.matmul, or fp8_tensor)",
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=2,
        metavar="N",
        help="micro-batches to measure on (default: 2)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE.html",
        type=Path,
        help="draw layers and linears as heat maps",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.terminal import print_json, show_progress, style
    from orchestrator.plan.rounding.measurement import Request
    from orchestrator.verify.rounding import document, measure, with_matmul
    from orchestrator.verify.rounding_lines import lines

    if args.run is not None and "=" in args.run:
        overrides = [args.run, *overrides]
        args.run = None
    _check(args, overrides)
    plan, checkpoints = _of_words(args, overrides) if overrides else _of_run(args.run)
    plan = with_matmul(plan, args.matmul)
    request = Request(plan=plan, checkpoints=checkpoints, batches=args.batches)
    measurement = measure(request, show_progress)
    if args.json:
        print_json(document(plan, measurement))
    else:
        print("\n".join(lines(plan, measurement, style())))
    if args.out:
        _write_page(args.out, plan, measurement)
    return Exit.DONE


def _check(args: argparse.Namespace, overrides: list[str]) -> None:
    """Raises OrchError (64) for arguments that contradict each other."""
    if args.run is not None and overrides:
        raise OrchError(
            f"{overrides[0]!r}: a run has its own configuration; leave out {args.run!r} to measure"
            " a new model, or choose the recipe with --matmul"
        )
    if not 1 <= args.batches <= MOST_BATCHES:
        raise OrchError(f"--batches {args.batches}: from 1 to {MOST_BATCHES}")
    if args.out and args.out.suffix.lower() != ".html":
        raise OrchError(f"--out {args.out}: the file must end in .html")
    if args.out and not args.out.absolute().parent.is_dir():
        raise OrchError(f"--out {args.out}: there is no folder {args.out.absolute().parent}")


def _of_run(name: str | None) -> tuple[Plan, str]:
    """Returns the plan of a run and the folder of its checkpoints. Raises OrchError (65) if it has
    none."""
    from orchestrator.cli.session import find_run, plan_of_run
    from orchestrator.plan.worker import checkpoint_dir, committed

    folder = find_run(name)
    plan = plan_of_run(folder)
    checkpoints = checkpoint_dir(plan.job.checkpoint.dir, str(folder.path))
    if not plan.program and not committed(checkpoints):
        raise OrchError(
            f"run {folder.run_id} has no checkpoint in {checkpoints}; measure a new model of its"
            " configuration: orch precision key=value ...",
            Exit.CONFIG,
        )
    return plan, str(checkpoints)


def _of_words(args: argparse.Namespace, overrides: list[str]) -> tuple[Plan, str]:
    """Returns the plan of a configuration, whose model is new."""
    from orchestrator.cli.session import home
    from orchestrator.config.compose import load
    from orchestrator.planner.build import build_plan
    from orchestrator.submit.cluster import ClusterResolver, with_token_folder

    config = with_token_folder(load(overrides, args.config_dir), home())
    resolve = ClusterResolver(home())
    return build_plan(config, resolve(config.cluster), profile=resolve.profile(config)), ""


def _write_page(path: Path, plan: Plan, measurement: Measurement) -> None:
    from orchestrator.cli.terminal import write_file
    from orchestrator.plan.rounding.wide import is_wide
    from orchestrator.verify.rounding_page import page

    patterns = tuple(proposal.pattern for proposal in measurement.proposals)
    layers = plan.model.layers
    content = page(
        plan,
        measurement,
        lambda linear: is_wide(patterns, linear.layer, linear.name, layers),
    )
    write_file(path, content.encode(), "--out")
