"""`orch status [run]`: shows the current state of a run. The exit code is 0 for every state;
`--json` has the exit code of the run."""

from __future__ import annotations

import argparse

from orchestrator.plan.exits import Exit

_REFRESH_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one (default: the newest run)",
    )
    watch_help = "refresh until the run has ended"
    parser.add_argument("--watch", "-w", action="store_true", help=watch_help)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    from orchestrator.api import Run
    from orchestrator.cli.terminal import print_json, style

    job = Run.find(args.run)
    look = style()
    while True:
        state, live, spent = job.status()
        if args.json:
            goodput = {
                "wall_s": spent.wall_s,
                "ettr": spent.ettr,
                "seconds": spent.seconds,
                "faults": spent.faults,
            }
            print_json(
                {
                    "state": state,
                    "live": live,
                    "goodput": goodput,
                    "run_dir": str(job.folder.path),
                }
            )
        else:
            from orchestrator.observe.pages.run_page import run_page

            clear = "\033[H\033[2J" if args.watch and look.colour else ""
            print(clear + run_page(state, live, look, spent), flush=True)
        if not args.watch or state.is_final:
            return Exit.DONE
        time.sleep(_REFRESH_S)
