"""`orch list`: the runs of this user on this machine, newest first; with --everyone those of a
cluster, too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import FoundRun
    from orchestrator.run.state import RunState

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", "-a", action="store_true", help=f"not only the newest {_SHOWN}")
    everyone = "also those that a cluster's controller knows of, whoever has submitted them"
    parser.add_argument("--everyone", action="store_true", help=everyone)
    parser.add_argument("--active", action="store_true", help="only those that have not ended")
    parser.add_argument(
        "--state",
        metavar="STATE",
        help="only those in this state, or in one of several: failed,stopped",
    )
    parser.add_argument(
        "--name",
        metavar="TEXT",
        help="only those whose id holds this; with * and ?: whose id is it",
    )
    parser.add_argument("--backend", metavar="NAME", help="only those of this backend")
    parser.add_argument(
        "--newer-than", metavar="AGE", help="only those submitted since: 90m, 12h, 30d, 4w"
    )
    parser.add_argument("--older-than", metavar="AGE", help="only those submitted before that")


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
    matches = _filter(args, now)
    rows: list[msgspec.Raw | dict[str, str]] = []
    table: list[tuple[str, ...]] = []
    unreadable: dict[str, str] = {}
    backends = Backends()
    folders = all_runs(home())
    hidden = 0
    cluster_runs = (
        {cluster_run.state.run_id: cluster_run for cluster_run in _others()}
        if args.everyone
        else {}
    )
    folders = [folder for folder in folders if folder.run_id not in cluster_runs]
    row_limit = None if args.all or args.active else _SHOWN
    if matches is None:
        folders, hidden = folders[:row_limit], len(folders[row_limit or len(folders) :])
    for folder in folders:
        try:
            state = backends.of(folder).state(folder)
            if matches is not None and not matches(state):
                continue
            if len(table) == row_limit:
                hidden += 1
                continue
            live = read_live(folder, state, now)
            raw = msgspec.Raw(
                msgspec.json.encode({"state": state, "live": live}) if args.json else b""
            )
            table.append(list_row(state, live, now))
            rows.append(raw)
        except Exception as error:  # whatever lies in the folder of one run, the others are listed
            unreadable[folder.run_id] = reason_of(error)
    for cluster_run in cluster_runs.values():
        if matches is None or matches(cluster_run.state):
            table.append(list_row(cluster_run.state, cluster_run.live, now))
            rows.append(
                msgspec.Raw(
                    msgspec.json.encode(
                        {
                            "state": cluster_run.state,
                            "live": cluster_run.live,
                            "where": cluster_run.where,
                        }
                    )
                )
            )
    if args.json:
        print_json(
            [
                *rows,
                *(
                    {"run_id": run_id, "unreadable": reason}
                    for run_id, reason in unreadable.items()
                ),
            ]
        )
        return Exit.DONE
    if table or not unreadable:
        none = "no active runs" if args.active else "no runs" if matches is None else "no such runs"
        print(list_page(table, style()) if table else none)
    for run_id, reason in unreadable.items():
        print(f"{run_id}  unreadable: {reason}")
    if hidden:
        print(f"... {hidden} older: orch list --all")
    return Exit.DONE


def _others() -> list[FoundRun]:
    """Runs that the schedulers of this machine know of, newest first."""
    from orchestrator.backends.base import BUILT_IN, RunDiscovery, get_backend

    backends = [
        backend for backend in map(get_backend, BUILT_IN) if isinstance(backend, RunDiscovery)
    ]
    return sorted(
        (run for backend in backends for run in backend.everyone()),
        key=lambda run: -run.state.created_at,
    )


def _filter(args: argparse.Namespace, now: float) -> Callable[[RunState], bool] | None:
    """Whether a run is asked for; None: every run is. OrchError (64) for a state or backend that
    there is not."""
    from fnmatch import fnmatchcase
    from typing import get_args

    from orchestrator.backends.base import backend_names
    from orchestrator.run.removal import seconds
    from orchestrator.run.state import Phase

    tests: list[Callable[[RunState], bool]] = []
    if args.active:
        tests.append(lambda state: not state.is_final)
    if args.state is not None:
        states = args.state.split(",")
        _check("state", states, get_args(Phase))
        tests.append(lambda state: state.state in states)
    if args.backend is not None:
        _check("backend", [args.backend], backend_names())
        tests.append(lambda state: state.backend == args.backend)
    if args.name is not None:
        pattern = args.name if set(args.name) & set("*?[") else f"*{args.name}*"
        tests.append(lambda state: fnmatchcase(state.run_id, pattern))
    if args.newer_than is not None:
        earliest = now - seconds(args.newer_than)
        tests.append(lambda state: state.created_at >= earliest)
    if args.older_than is not None:
        latest = now - seconds(args.older_than)
        tests.append(lambda state: state.created_at < latest)
    return (lambda state: all(test(state) for test in tests)) if tests else None


def _check(kind: str, names: list[str], legal: Iterable[str]) -> None:
    for name in names:
        if name not in legal:
            raise OrchError(f"unknown {kind} {name!r}; {did_you_mean(name, legal)}", Exit.USAGE)
