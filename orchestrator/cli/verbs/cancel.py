"""`orch cancel <run>`: end a run. Its workers save first; `--force` does not wait for that."""

from __future__ import annotations

import argparse

from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument("--force", action="store_true", help="kill it at once, nothing is saved")
    parser.add_argument("--no-wait", action="store_true", help="return when it has been asked")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.api import Run
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.observe.pages.run_page import end_lines

    job = Run.find(args.run)
    state = job.cancel(args.force, wait=not args.no_wait)
    if args.json:
        print_json(state)
    elif args.no_wait:
        print(f"asked {job.id} to end; orch status {job.id}")
    else:
        print("\n".join(end_lines(state, style())))
    return Exit.DONE
