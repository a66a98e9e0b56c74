"""`orch rm <run>...`: removes ended runs with their logs, metrics and checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.run.folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="run",
        help="handle, id, or the beginning of one",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs, remove nothing")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.session import home, open_run
    from orchestrator.run.registry import all_runs
    from orchestrator.run.removal import runs_that_save_in, size_of

    folders = {}
    for name in args.runs:  # every run is checked before the first is removed
        folder, backend = open_run(name)
        state = backend.state(folder)
        if not state.is_final or backend.is_alive(folder):
            raise OrchError(
                f"run {folder.run_id} is {state.state}: cancel it first, or wait for its end",
                Exit.USAGE,
            )
        folders[folder.run_id] = folder
    guests = runs_that_save_in(all_runs(home()))
    for run_id in folders:
        if staying := sorted({*guests.get(run_id, ())} - folders.keys()):
            raise OrchError(
                f"run {staying[0]} saves in the folder of run {run_id} (checkpoint.dir): remove it"
                " as well, or move the checkpoints first",
                Exit.USAGE,
            )
    return remove_all(
        [(folder, size_of(folder)) for folder in folders.values()],
        args.dry_run,
        args.json,
    )


def remove_all(runs: Sequence[tuple[RunFolder, int]], dry_run: bool, as_json: bool) -> int:
    """Removes these (run, bytes), and prints them. A run that cannot be removed does not keep the
    others; its OrchError is raised at the end."""
    import sys

    from orchestrator.backends.base import Elsewhere
    from orchestrator.cli.session import Backends
    from orchestrator.cli.terminal import print_json, show_progress
    from orchestrator.run.removal import remove
    from orchestrator.style import binary

    rows: list[dict[str, Any]] = []
    problems: list[OrchError] = []
    backends = Backends()
    for index, (folder, size) in enumerate(runs):
        show_progress(index, len(runs), folder.run_id)
        row: dict[str, Any] = {
            "run_id": folder.run_id,
            "run_dir": str(folder.path.resolve()),
            "bytes": size,
        }
        try:
            if not dry_run:
                backend = backends.of(folder)
                if isinstance(backend, Elsewhere):
                    backend.remove_there(folder)
                remove(folder)
            rows.append(row)
        except OrchError as error:
            problems.append(error)
    show_progress(len(runs), len(runs), "")
    if as_json:
        print_json([{**row, "removed": not dry_run} for row in rows])
    else:
        action = "would remove" if dry_run else "removed"
        for row in rows:
            print(f"{action}  {row['run_id']}  {binary(row['bytes'])}")
        total = binary(sum(row["bytes"] for row in rows))
        print(f"{len(rows)} run{'s' * (len(rows) != 1)}, {total}")
    for problem in problems[:-1]:
        print(f"orch: error: {problem.message}", file=sys.stderr)
    if problems:
        raise problems[-1]
    return Exit.DONE
