"""`orch gc`: removes old ended runs, oldest first, and the remains of interrupted removals."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.run.folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        help="remove runs that ended longer ago: 12h, 30d, 4w (default without --size: 30d)",
    )
    parser.add_argument(
        "--size",
        metavar="SIZE",
        help="remove runs until all take at most this: 500M, 20G",
    )
    parser.add_argument(
        "--keep",
        metavar="N",
        type=int,
        default=10,
        help="always keep the N newest ended runs (default: 10)",
    )
    keep_best_help = "always keep the N runs with the lowest last loss of each model or program"
    parser.add_argument(
        "--keep-best",
        metavar="N",
        type=int,
        default=0,
        help=keep_best_help,
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs, remove nothing")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    from orchestrator.cli.session import home
    from orchestrator.errors import OrchError
    from orchestrator.run.registry import all_runs, runs_folder
    from orchestrator.run.removal import (
        byte_count,
        clear_up,
        runs_that_save_in,
        seconds,
        size_of,
    )

    from .rm import remove_all

    for flag, number in (("--keep", args.keep), ("--keep-best", args.keep_best)):
        if number < 0:
            raise OrchError(f"{flag} must not be negative", Exit.USAGE)
    least_age = float("-inf")
    if args.older_than or not args.size:
        least_age = seconds(args.older_than or "30d")
    size_limit = byte_count(args.size) if args.size else None
    folders = all_runs(home())
    now = time.time()
    ended = _ended(folders)
    protected = {
        *_best([folder for folder, _ in ended], args.keep_best),
        *runs_that_save_in(folders),
    }
    sizes = {folder.run_id: size_of(folder) for folder in folders} if size_limit is not None else {}
    remaining_bytes = sum(sizes.values())
    removals = []
    for folder, ended_at in reversed(ended[args.keep :]):
        if (
            folder.run_id in protected
            or now - ended_at < least_age
            or (size_limit is not None and remaining_bytes <= size_limit)
        ):
            continue
        size = sizes[folder.run_id] if size_limit is not None else size_of(folder)
        removals.append((folder, size))
        remaining_bytes -= size
    if not args.dry_run:
        clear_up(runs_folder(home()))
    return remove_all(removals, args.dry_run, args.json)


def _ended(folders: list[RunFolder]) -> list[tuple[RunFolder, float]]:
    """Returns the runs that have ended according to their backends, with the time of their end, the
    newest first. Runs that are unreadable, or whose scheduler does not answer, are skipped."""
    from orchestrator.cli.session import Backends

    backends = Backends()
    ended = []
    for folder in folders:
        try:
            backend = backends.of(folder)
            state = backend.state(folder)
            if state.is_final and not backend.is_alive(folder):
                ended.append((folder, state.ended_at or state.updated_at))
        except Exception:  # an unreadable folder is not removed
            continue
    return sorted(ended, key=lambda pair: -pair[1])


def _best(ended: list[RunFolder], count: int) -> set[str]:
    """Returns the ids of the `count` runs with the lowest last loss of each model or program, whose
    losses cannot be compared with those of others. Runs without a reported loss do not count."""
    import contextlib
    import json

    from orchestrator.errors import OrchError
    from orchestrator.run.request import read_request

    losses: dict[str, list[tuple[float, str]]] = {}
    for folder in ended if count else ():
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OrchError):
            loss = float(json.loads(folder.report.read_bytes())["loss"]["last"])
            summary = read_request(folder).summary
            kind = str(summary.get("model") or summary.get("program"))
            losses.setdefault(kind, []).append((loss, folder.run_id))
    best = [sorted(candidates)[:count] for candidates in losses.values()]
    return {run_id for candidates in best for _, run_id in candidates}
