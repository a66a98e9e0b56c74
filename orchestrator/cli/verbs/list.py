"""`orch list`: the runs of this user on this machine, newest first."""

from __future__ import annotations

import argparse

from orchestrator.plan.exits import Exit

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", "-a", action="store_true", help=f"not only the newest {_SHOWN}")
    parser.add_argument("--active", action="store_true", help="only those that have not ended")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    import msgspec

    from orchestrator.cli.session import Backends, home
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.observe.live import read_live
    from orchestrator.observe.pages.run_page import list_page, list_row
    from orchestrator.run.folder import reason_of
    from orchestrator.run.registry import all_runs

    now = time.time()
    rows: list[msgspec.Raw | dict[str, str]] = []
    table: list[tuple[str, ...]] = []
    unreadable: dict[str, str] = {}
    backends = Backends()
    found = all_runs(home())
    shown = found if args.all or args.active else found[:_SHOWN]
    for folder in shown:
        try:
            state = backends.of(folder).state(folder)
            if args.active and state.is_final:
                continue
            live = read_live(folder, state, now)
            raw = msgspec.Raw(msgspec.json.encode({"state": state, "live": live}) if args.json else b"")
            table.append(list_row(state, live, now))
            rows.append(raw)
        except Exception as error:  # whatever lies in the folder of one run, the others are listed
            unreadable[folder.run_id] = reason_of(error)
    if args.json:
        print_json([*rows, *({"run_id": run_id, "unreadable": why} for run_id, why in unreadable.items())])
        return Exit.DONE
    if table or not unreadable:
        print(list_page(table, style()) if table else "no active runs" if args.active else "no runs")
    for run_id, why in unreadable.items():
        print(f"{run_id}  unreadable: {why}")
    if hidden := len(found) - len(shown):
        print(f"... {hidden} older: orch list --all")
    return Exit.DONE
