"""`orch drill [run]`: breaks parts of a running job on purpose, and measures its recovery."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.style import Style

_INDENT = 12  # columns of the number of a trial, whose line goes on below it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from orchestrator.drill.faults import KINDS, POSITIONS

    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one (default: the newest run)",
    )
    fault_help = "; ".join(f"{name}: {kind.help}" for name, kind in KINDS.items())
    parser.add_argument(
        "--faults",
        metavar="A,B",
        default="kill_worker",
        help=fault_help,
    )
    parser.add_argument(
        "--victim",
        metavar="WHO",
        default="any",
        help=f"{', '.join(POSITIONS)}, or a node's name (default: any)",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=1,
        metavar="N",
        help="trials per fault, or in total with --random (default: 1)",
    )
    parser.add_argument("--random", action="store_true", help="inject the faults in a random order")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the victims and of the random order (default: 0)",
    )
    parser.add_argument(
        "--every-s",
        type=float,
        default=0.0,
        metavar="S",
        help="least seconds from one fault to the next (default: 0)",
    )
    parser.add_argument(
        "--for-s",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds that a fault, or a termination grace period, lasts (default: 5)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds for the run to recover (default: 120)",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:

    from orchestrator.cli.session import find_run
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.drill.faults import check_kinds, plan_injections
    from orchestrator.drill.session import open_drill, session

    if args.trials < 1 or args.for_s < 0 or args.limit_s <= 0:
        raise OrchError(
            "`orch drill`: --trials must be at least 1, --for-s at least 0, --limit-s above 0",
            Exit.USAGE,
        )
    faults = check_kinds([name for name in args.faults.split(",") if name])
    if not faults:
        raise OrchError("`orch drill --faults` names no fault", Exit.USAGE)
    folder = find_run(args.run)
    drilled, targets = open_drill(folder, faults, args.victim, args.limit_s)
    plan = plan_injections(
        faults,
        args.victim,
        args.trials,
        args.seed,
        args.random,
    )
    look = style()
    trials, stopped = session(
        drilled,
        targets,
        plan,
        for_s=args.for_s,
        every_s=args.every_s,
        say=partial(_say, look=look, as_json=args.json),
        style=look,
    )
    from orchestrator.drill.trial import score

    rows = score(trials)
    if args.json:
        document = {
            "run": folder.run_id,
            "seed": args.seed,
            "trials": trials,
            "score": rows,
            "stopped": stopped,
        }
        print_json(document)
    else:
        from orchestrator.observe.pages.drill_page import table

        print(table(rows, look))
    recovered = all(trial.ok for trial in trials) and not stopped
    return Exit.DONE if recovered else Exit.USER


def _say(line: str, look: Style, as_json: bool) -> None:
    """Prints a line of a drill, folded below its number; beside JSON on standard error."""
    stream = sys.stderr if as_json else sys.stdout
    print(*look.fold(line, _INDENT), sep="\n", file=stream)
