"""`orch list`: the runs of this user on this machine, newest first."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", "-a", action="store_true", help=f"not only the newest {_SHOWN}")
    parser.add_argument("--active", action="store_true", help="only those that have not ended")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    from orchestrator.backends.base import get_backend
    from orchestrator.cli.session import home
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.errors import OrchError
    from orchestrator.observe.live import read_live
    from orchestrator.run.registry import all_runs
    from orchestrator.run.state import read_state

    now = time.time()
    rows, damaged = [], 0
    backends: dict[str, Backend] = {}  # one of each kind, which then asks its scheduler once for all runs
    found = all_runs(home())
    for folder in found if args.all or args.active else found[:_SHOWN]:
        try:
            name = read_state(folder).backend
            if name not in backends:
                backends[name] = get_backend(name)
            state = backends[name].state(folder)
        except OrchError:
            damaged += 1
            continue
        if not (args.active and state.is_final):
            rows.append((state, read_live(folder, state, now)))
    if args.json:
        print_json([{"state": state, "live": live} for state, live in rows])
        return Exit.DONE
    from orchestrator.observe.pages.run_page import list_page

    print(list_page(rows, now, style()) if rows else "no runs" if not args.active else "no active runs")
    hidden = len(found) - len(rows) - damaged
    if hidden > 0 and not args.active:
        print(f"... {hidden} older: orch list --all")
    if damaged:
        print(f"{damaged} without a readable state")
    return Exit.DONE
