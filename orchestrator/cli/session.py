"""What verbs work on: the runs of this user, and how a job is submitted from this shell."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.plan import Plan
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.request import LaunchRequest
    from orchestrator.submit.submission import SubmitOptions


def home() -> Path:
    """Where runs, measured clusters and bad nodes of this user are kept."""
    from orchestrator.run.folder import home_folder

    return home_folder(os.environ)


def find_run(name: str | None) -> RunFolder:
    """The run that a handle, an id or the beginning of one means; None: the newest. OrchError (64)."""
    from orchestrator.run import registry

    return registry.find_run(home(), name)


def open_run(name: str | None) -> tuple[RunFolder, Backend]:
    """A run and the backend that it was submitted to. OrchError: 64 for an unknown run, 65 for an unreadable one."""
    folder = find_run(name)
    return folder, Backends().of(folder)


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


def plan_of_run(folder: RunFolder) -> Plan:
    """OrchError (65) where it is missing or damaged."""
    from orchestrator.plan import PlanError, load_plan

    try:
        return load_plan(folder.plan)
    except PlanError as error:
        raise OrchError(f"run {folder.run_id}: {error}", Exit.CONFIG) from None


def request_of_run(folder: RunFolder) -> LaunchRequest:
    """What a run was started with. OrchError (65): there is none, or the bundled trainer does not run its plan."""
    from orchestrator.run.request import read_request

    request = read_request(folder)
    if request.worker.bundled:
        from orchestrator.plan.trained import refusal

        if problem := refusal(plan_of_run(folder)):
            raise OrchError(f"run {folder.run_id}: {problem}", Exit.CONFIG)
    return request


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `submit_options` reads."""
    parser.add_argument("--env", metavar="NAME", action="append", default=[], help="pass this variable on; repeatable")
    where = parser.add_mutually_exclusive_group()
    here = "run the program in this folder (as a rule where nodes share it)"
    where.add_argument("--in-place", action="store_true", default=None, help=here)
    copy = "run the program in a copy of this folder, as it is now"
    where.add_argument("--snapshot", action="store_false", dest="in_place", help=copy)
    parser.add_argument("--run-id", metavar="ID", help="instead of <name>-<time>-<random>")
    after = "start when that run has ended well (any:RUN in any way, notok:RUN not well); repeatable"
    parser.add_argument("--after", metavar="RUN", action="append", default=[], help=after)


def submit_options(args: argparse.Namespace, dry_run: bool, overrides: Sequence[str] = ()) -> SubmitOptions:
    """From the flags of `add_request_arguments`, and this shell. `overrides`: of the command line; where they name a
    model or its training, a program is planned by it."""
    from orchestrator.submit.submission import names_model

    wishes: dict[str, Any] = {
        "env": tuple(args.env),
        "in_place": args.in_place,
        "run_id": args.run_id,
        "after": tuple(args.after),
    }
    wishes["program"] = bool(args.command) and not names_model(overrides)
    return from_here(command=tuple(args.command or ()), dry_run=dry_run, **wishes)


def from_here(**wishes: Any) -> SubmitOptions:
    """`wishes`: those fields of `SubmitOptions` that do not come from this shell."""
    from orchestrator.submit.submission import SubmitOptions

    return SubmitOptions(home=home(), cwd=Path.cwd(), python=sys.executable, environ=os.environ, **wishes)
