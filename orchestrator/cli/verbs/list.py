"""`orch list`: lists the runs of this user on this machine, newest first; with --everyone also all
runs of a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    import msgspec

    from orchestrator.backends.base import FoundRun
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.state import RunState

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    all_help = f"list all runs, not only the newest {_SHOWN}"
    parser.add_argument("--all", "-a", action="store_true", help=all_help)
    everyone_help = "list also the runs of all users that a cluster's controller knows"
    parser.add_argument("--everyone", action="store_true", help=everyone_help)
    parser.add_argument("--active", action="store_true", help="only runs that have not ended")
    parser.add_argument(
        "--state",
        metavar="STATE",
        help="only runs in this state, or in one of several: failed,stopped",
    )
    parser.add_argument(
        "--name",
        metavar="TEXT",
        help="only runs whose id contains this, or matches this pattern of * and ?",
    )
    parser.add_argument("--backend", metavar="NAME", help="only runs of this backend")
    parser.add_argument(
        "--newer-than",
        metavar="AGE",
        help="only runs submitted less than this ago: 90m, 12h, 4w",
    )
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        help="only runs submitted more than this ago",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    from orchestrator.cli.session import home
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.observe.pages.run_page import list_page
    from orchestrator.run.registry import all_runs

    now = time.time()
    matches = _filter(args, now)
    cluster_runs = {run.state.run_id: run for run in _cluster_runs()} if args.everyone else {}
    folders = [folder for folder in all_runs(home()) if folder.run_id not in cluster_runs]
    listing = _Listing(now, row_limit=None if args.all or args.active else _SHOWN)
    listing.add_own_runs(folders, matches, args.json)
    for cluster_run in cluster_runs.values():
        if matches is None or matches(cluster_run.state):
            listing.add_cluster_run(cluster_run)
    unreadable = listing.unreadable.items()
    if args.json:
        damaged = [{"run_id": run_id, "unreadable": reason} for run_id, reason in unreadable]
        print_json([*listing.documents, *damaged])
        return Exit.DONE
    if listing.table:
        print(list_page(listing.table, style()))
    elif not unreadable:
        adjective = "such " if matches else ""
        print("no active runs" if args.active else f"no {adjective}runs")
    for run_id, reason in unreadable:
        print(f"{run_id}  unreadable: {reason}")
    if listing.hidden:
        print(f"... {listing.hidden} older: orch list --all")
    return Exit.DONE


class _Listing:
    """The runs to list: rows of the table and JSON documents, unreadable runs with the reason, and
    the number of runs beyond the limit."""

    def __init__(self, now: float, row_limit: int | None):
        self.table: list[tuple[str, ...]] = []
        self.documents: list[msgspec.Raw] = []
        self.unreadable: dict[str, str] = {}
        self.hidden = 0
        self._now = now
        self._row_limit = row_limit

    def add_own_runs(
        self,
        folders: list[RunFolder],
        matches: Callable[[RunState], bool] | None,
        as_json: bool,
    ) -> None:
        from orchestrator.cli.session import Backends
        from orchestrator.run.folder import reason_of

        if matches is None and self._row_limit is not None:
            # Without a filter the older runs are counted without being read.
            self.hidden = len(folders[self._row_limit :])
            folders = folders[: self._row_limit]
        backends = Backends()
        for folder in folders:
            try:
                state = backends.of(folder).state(folder)
                if matches is not None and not matches(state):
                    continue
                if len(self.table) == self._row_limit:
                    self.hidden += 1
                    continue
                self._add_run(folder, state, as_json)
            except Exception as error:  # a damaged folder must not hide the other runs
                self.unreadable[folder.run_id] = reason_of(error)

    def _add_run(self, folder: RunFolder, state: RunState, as_json: bool) -> None:
        import msgspec

        from orchestrator.observe.live import read_live
        from orchestrator.observe.pages.run_page import list_row

        live = read_live(folder, state, self._now)
        # Encoding may fail: nothing is added before.
        document = msgspec.json.encode({"state": state, "live": live}) if as_json else b""
        self.table.append(list_row(state, live, self._now))
        self.documents.append(msgspec.Raw(document))

    def add_cluster_run(self, run: FoundRun) -> None:
        import msgspec

        from orchestrator.observe.pages.run_page import list_row

        self.table.append(list_row(run.state, run.live, self._now))
        document = {
            "state": run.state,
            "live": run.live,
            "where": run.where,
        }
        self.documents.append(msgspec.Raw(msgspec.json.encode(document)))


def _cluster_runs() -> list[FoundRun]:
    """Returns the runs that the schedulers of this machine know, newest first."""
    from orchestrator.backends.base import BUILT_IN, RunDiscovery, get_backend

    backends = [
        backend for backend in map(get_backend, BUILT_IN) if isinstance(backend, RunDiscovery)
    ]
    return sorted(
        (run for backend in backends for run in backend.everyone()),
        key=lambda run: -run.state.created_at,
    )


def _filter(args: argparse.Namespace, now: float) -> Callable[[RunState], bool] | None:
    """Returns the test of the filter flags, or None if there are none. Raises OrchError (64) for an
    unknown state or backend."""
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
