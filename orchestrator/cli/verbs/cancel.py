"""`orch cancel <run>`: ends a run. Its workers save first, unless `--force` kills them."""

from __future__ import annotations

import argparse

from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument("--force", action="store_true", help="kill the run at once without saving")
    no_wait_help = "return after sending the request, without waiting for the run to end"
    parser.add_argument("--no-wait", action="store_true", help=no_wait_help)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.api import Run
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.observe.pages.run_page import end_lines

    job = Run.find(args.run)
    state = job.cancel(args.force, wait=not args.no_wait)
    if args.json:
        print_json(state)
    elif args.no_wait:
        print(f"sent the request to end {job.id}; see orch status {job.id}")
    else:
        print("\n".join(end_lines(state, style())))
    return Exit.DONE
