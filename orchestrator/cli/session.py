"""Finding runs of this user for the verbs, and the options of a submission from this shell."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.api import Run, home, options_from_here, plan_of_run, request_of_run

__all__ = [
    "Backends",
    "find_run",
    "home",
    "open_run",
    "options_from_here",
    "plan_of_run",
    "request_of_run",
]

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.run.folder import RunFolder
    from orchestrator.submit.submission import SubmitOptions


def find_run(name: str | None) -> RunFolder:
    """Returns the run with this handle, id or beginning of an id; the newest run for None. Raises
    OrchError (64) when there is none."""
    from orchestrator.run import registry

    return registry.find_run(home(), name)


def open_run(name: str | None) -> tuple[RunFolder, Backend]:
    """Returns a run and the backend that it was submitted to. Raises OrchError: 64 for an unknown
    run, 65 for an unreadable one."""
    run = Run.find(name)
    return run.folder, run.backend


class Backends:
    """One backend object per kind, so that a scheduler is queried once for all runs."""

    def __init__(self) -> None:
        self._by_name: dict[str, Backend] = {}

    def of(self, folder: RunFolder) -> Backend:
        """Returns the backend that a run was submitted to. Raises OrchError (65) if the run is
        unreadable."""
        from orchestrator.backends.base import get_backend
        from orchestrator.run.state import read_state

        name = read_state(folder).backend
        if name not in self._by_name:
            self._by_name[name] = get_backend(name)
        return self._by_name[name]


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `submit_options` reads."""
    parser.add_argument(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="pass this variable to the program; repeatable",
    )
    code_location = parser.add_mutually_exclusive_group()
    in_place_help = (
        "run the program in this folder (the default where nodes share it); on Kubernetes, in that"
        " of the image"
    )
    code_location.add_argument(
        "--in-place",
        action="store_true",
        default=None,
        help=in_place_help,
    )
    snapshot_help = "run the program in a copy of this folder, as it is now"
    code_location.add_argument(
        "--snapshot",
        action="store_false",
        dest="in_place",
        help=snapshot_help,
    )
    run_id_help = "id of the run (default: <name>-<time>-<random>)"
    parser.add_argument("--run-id", metavar="ID", help=run_id_help)
    after_help = (
        "start when this run has succeeded (any:RUN when it has ended, notok:RUN when it has ended"
        " without success); repeatable"
    )
    parser.add_argument(
        "--after",
        metavar="RUN",
        action="append",
        default=[],
        help=after_help,
    )


def submit_options(
    args: argparse.Namespace,
    dry_run: bool,
    overrides: Sequence[str] = (),
) -> SubmitOptions:
    """Returns the options of a submission: the flags of `add_request_arguments`, and this shell.
    A program is planned by the model or the training that the `overrides` name, if they do."""
    from orchestrator.submit.submission import names_model

    settings: dict[str, Any] = {
        "env": tuple(args.env),
        "in_place": args.in_place,
        "run_id": args.run_id,
        "after": tuple(args.after),
    }
    settings["program"] = bool(args.command) and not names_model(overrides)
    return options_from_here(
        command=tuple(args.command or ()),
        dry_run=dry_run,
        **settings,
    )
