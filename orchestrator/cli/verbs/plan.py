"""`orch plan`: places a model on a cluster and predicts its cost, without starting anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.plan import Plan
    from orchestrator.plan.document import Cluster
    from orchestrator.planner.elastic.sizes import Sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from orchestrator.cli.parser import add_any

    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the plan as JSON, as a run would get it",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="explain what limits the plan, why it does not fit, and what to change",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="draw placement, memory and pipeline (.png, .svg or .html)",
    )
    add_any(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.plot:
        from orchestrator.observe.plots import plan_picture as plot

        plot.ending(args.plot)  # refuses a wrong file name before the work

    from orchestrator.api import plan_all_sizes

    sizes, resolve = plan_all_sizes(
        overrides,
        args.config_dir,
        args.any,
        settle=args.explain,
    )
    _, config, plan = sizes.legal[0]
    if args.out:
        from orchestrator.cli.terminal import write_file
        from orchestrator.plan import to_json

        write_file(args.out, to_json(plan, indent=1) + b"\n", "--out")
    if args.plot:
        plot.save(plan, args.plot)
    if args.explain and args.json:
        print(_explained(config, resolve(config.cluster), plan))
        return Exit.DONE
    show(plan, args.json)
    if not args.json:
        _print_sizes(sizes, config)
    if args.explain:
        from orchestrator.cli.terminal import style
        from orchestrator.observe.pages.plan_page import explanation
        from orchestrator.planner.explain import explain

        limits = explain(config, resolve(config.cluster), plan)
        print(f"\n{explanation(limits, plan.time.step_s, plan.time.sd, style().width)}")
    return Exit.DONE


_MOST_REASONS = 8  # refused sizes that are shown with the reason


def _print_sizes(sizes: Sizes, config: Config) -> None:
    """Prints the sizes of `nodes=A..B`, and when the scheduler would start each of them, if there
    is one."""
    starts = _starts(sizes, config)
    if not sizes.refused and len(sizes.legal) == 1:
        if starts:
            print(f"\nSlurm: {starts[0]}")
        return
    from orchestrator.cli.terminal import style
    from orchestrator.plan import batch
    from orchestrator.plan.interval import plus_minus
    from orchestrator.style import seconds

    print(f"\n{style().title('Sizes')}")
    usual = sizes.legal[0].plan.parallel.pp
    for index, size in enumerate(sizes.legal):
        par = size.plan.parallel
        when = f"  {starts[index]}" if starts else ""
        shape = f"dp={par.dp}" if par.pp == usual else f"pp={par.pp} dp={par.dp}"
        step = f"step {seconds(size.plan.time.step_s)}{plus_minus(size.plan.time.sd)}"
        print(f"{size.nodes:>4} nodes  {shape}, {batch.describe(par)}  {step}{when}")
    for nodes, reason in list(sizes.refused.items())[:_MOST_REASONS]:
        print(f"{nodes:>4} nodes  not legal: {reason}")
    if unlisted := list(sizes.refused)[_MOST_REASONS:]:
        print(f"not legal either: {', '.join(map(str, unlisted))}")


def _starts(sizes: Sizes, config: Config) -> list[str]:
    """Returns the scheduler's forecast of the start of each size, or nothing without a scheduler.
    Quick, and never an error."""
    import os

    folders = os.environ.get("PATH", "").split(os.pathsep)
    programs = (os.path.join(folder, name) for folder in folders for name in ("sbatch", "kubectl"))
    if not any(os.access(program, os.X_OK) for program in programs):
        return []  # without a scheduler, its modules are not imported

    from orchestrator.backends.base import Queueing, get_backend
    from orchestrator.cli.session import options_from_here
    from orchestrator.submit.program_code import program_code
    from orchestrator.submit.submission import make_bundle

    try:
        backend = get_backend(config.backend.name)
        if not isinstance(backend, Queueing):
            return []
        options = options_from_here(run_id="plan", in_place=True)
        # A generator: no bundle is made before the scheduler has answered.
        code = program_code(backend, options)
        bundles = (
            make_bundle(size.config, size.plan, backend, options, code) for size in sizes.legal
        )
        return backend.starts(bundles, os.environ)
    except OrchError:
        return []


def _explained(config: Config, cluster: Cluster, plan: Plan) -> str:
    import msgspec

    from orchestrator.plan.interval import interval
    from orchestrator.planner.explain import explain

    explanation = explain(config, cluster, plan)
    changes = [
        {
            "words" if name == "overrides" else name: value
            for name, value in change._asdict().items()
        }
        for change in explanation.changes
    ]
    terms = {term.name: term.seconds for term in explanation.terms}
    low, high = interval(plan.time.step_s, plan.time.sd)
    document = explanation._asdict() | {
        "terms": terms,
        "changes": changes,
        "categories": dict(explanation.categories),
    }
    document |= {
        "step_s": plan.time.step_s,
        "step_low_s": low,
        "step_high_s": high,
    }
    return msgspec.json.encode(document).decode()


def show(plan: Plan, as_json: bool) -> None:
    """Prints the plan: the JSON document, or a page in the width and the colours of the
    terminal."""
    if as_json:
        from orchestrator.plan import to_json

        print(to_json(plan).decode())
        return
    from orchestrator.cli.terminal import style
    from orchestrator.observe.pages.plan_page import render

    print(render(plan, style()))
