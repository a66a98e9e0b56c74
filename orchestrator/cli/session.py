"""What verbs work on: the runs of this user, and how a job is submitted from this shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.api import Run, from_here, home, plan_of_run, request_of_run

__all__ = ["Backends", "find_run", "from_here", "home", "open_run", "plan_of_run", "request_of_run"]

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.run.folder import RunFolder
    from orchestrator.submit.submission import SubmitOptions


def find_run(name: str | None) -> RunFolder:
    """The run that a handle, an id or the beginning of one means; None: the newest. OrchError
    (64)."""
    from orchestrator.run import registry

    return registry.find_run(home(), name)


def open_run(name: str | None) -> tuple[RunFolder, Backend]:
    """A run and the backend that it was submitted to. OrchError: 64 for an unknown run, 65 for an
    unreadable one."""
    run = Run.find(name)
    return run.folder, run.backend


class Backends:
    """One backend of each kind, which then asks its scheduler once for all runs."""

    def __init__(self) -> None:
        self._known: dict[str, Backend] = {}

    def of(self, folder: RunFolder) -> Backend:
        """The one that a run was submitted to. OrchError (65): the run is unreadable."""
        from orchestrator.backends.base import get_backend
        from orchestrator.run.state import read_state

        name = read_state(folder).backend
        if name not in self._known:
            self._known[name] = get_backend(name)
        return self._known[name]


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `submit_options` reads."""
    parser.add_argument(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="pass this variable on; repeatable",
    )
    code_location = parser.add_mutually_exclusive_group()
    in_place_help = "run the program in this folder (as a rule where nodes share it)"
    code_location.add_argument("--in-place", action="store_true", default=None, help=in_place_help)
    snapshot_help = "run the program in a copy of this folder, as it is now"
    code_location.add_argument(
        "--snapshot", action="store_false", dest="in_place", help=snapshot_help
    )
    parser.add_argument("--run-id", metavar="ID", help="instead of <name>-<time>-<random>")
    after_help = (
        "start when that run has ended well (any:RUN in any way, notok:RUN not well); repeatable"
    )
    parser.add_argument("--after", metavar="RUN", action="append", default=[], help=after_help)


def submit_options(
    args: argparse.Namespace, dry_run: bool, overrides: Sequence[str] = ()
) -> SubmitOptions:
    """From the flags of `add_request_arguments`, and this shell. `overrides`: of the command line;
    where they name a model or its training, a program is planned by it."""
    from orchestrator.submit.submission import names_model

    settings: dict[str, Any] = {
        "env": tuple(args.env),
        "in_place": args.in_place,
        "run_id": args.run_id,
        "after": tuple(args.after),
    }
    settings["program"] = bool(args.command) and not names_model(overrides)
    return from_here(command=tuple(args.command or ()), dry_run=dry_run, **settings)
