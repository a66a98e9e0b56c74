"""`orch submit`: plan a job, render its launch request, send it. `--dry-run` shows that request and sends nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.launch.backend import Backend
    from orchestrator.launch.request import Parcel
    from orchestrator.plan import Plan

HELP = "plan a job and start it; prints its handle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show plan and request, start and write nothing")
    parser.add_argument("--follow", "-f", action="store_true", help="watch it; ends with the run's exit code")
    add_request_arguments(parser)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What `make_parcel` reads, for every verb that makes a request."""
    parser.add_argument("--env", metavar="NAME", action="append", default=[], help="pass this variable on; repeatable")
    parser.add_argument("--in-place", action="store_true", help="run the program here, not in a copy of this folder")
    parser.add_argument("--run-id", metavar="ID", help="instead of <name>-<time>-<random>")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os

    from orchestrator.config.compose import load
    from orchestrator.launch.backend import get_backend
    from orchestrator.launch.run_folder import home_folder
    from orchestrator.planner.build import build_plan

    config = load(overrides, args.config_dir)
    backend = get_backend(config.backend.name)
    plan = build_plan(config)
    home = home_folder(os.environ)
    parcel = make_parcel(args, config, plan, backend, home)
    if args.dry_run:
        return _show(parcel, plan, backend, args.json)
    if not args.command and plan.memory.total > plan.memory.capacity and not config.run.allow_oom:
        raise OrchError(_too_large(plan), Exit.CONFIG)
    handle = send(parcel, backend, home)
    if not args.follow:
        _say_handle(handle, parcel, args.json)
        return Exit.DONE
    return _follow(handle, parcel, backend, args.json)


def make_parcel(args: argparse.Namespace, config: Config, plan: Plan, backend: Backend, home: Path) -> Parcel:
    """Gather the facts of this shell and render the request."""
    import os
    import sys
    import time

    from orchestrator.launch.find import runs_folder
    from orchestrator.launch.request import Code, Site, make_request
    from orchestrator.launch.run_folder import new_run_id
    from orchestrator.launch.snapshot import find_code

    name = config.run.name or "-".join(filter(None, (config.model.name, config.choices.get("parallel"))))
    runs = Path(config.run.dir).expanduser().absolute() if config.run.dir else runs_folder(home)
    cwd = Path.cwd()
    site = Site(
        run_id=args.run_id if args.run_id is not None else new_run_id(name, time.time()),
        home=str(home),
        runs_dir=str(runs),
        python=sys.executable,
        environment_names=sorted(os.environ),
        cwd=str(cwd),
        code=Code(kind="none") if args.in_place else find_code(cwd, wanted=bool(args.command)),
        agent_flags=list(backend.agent_flags),
    )
    return make_request(config, plan, site, args.command or (), args.env)


def _too_large(plan: Plan) -> str:
    need, have = plan.memory.total / 2**30, plan.memory.capacity / 2**30
    where = f"rank {plan.memory.worst_rank} needs {need:.1f} GiB of {have:.1f} GiB"
    return f"the plan does not fit: {where}; `orch plan` shows what takes it, run.allow_oom=true submits it anyway"


def _show(parcel: Parcel, plan: Plan, backend: Backend, as_json: bool) -> int:
    from orchestrator.launch.request import to_bytes

    if as_json:
        print(to_bytes(parcel.request).decode(), end="")
        return Exit.DONE
    from orchestrator.cli.terminal import style
    from orchestrator.launch.pages import request_page
    from orchestrator.report.page import render

    look = style()
    print(render(plan, look), request_page(parcel.request, look), sep="\n\n")
    print("\nNothing was started or written. `--dry-run --json` prints the request as it would be sent.")
    try:
        backend.check(parcel.request)
        if script := getattr(backend, "script", None):  # of a scheduler: what it would be given
            print("", script(parcel.request, plan), sep="\n", end="")
    except OrchError as error:
        print(f"Submitting it here would be refused: {error.message}")
    return Exit.DONE


def send(parcel: Parcel, backend: Backend, home: Path) -> str:
    import os

    from orchestrator.launch.find import register
    from orchestrator.launch.run_folder import RunFolder

    os.umask(0o077)
    handle = backend.submit(parcel, os.environ)
    register(home, RunFolder(Path(parcel.request.run_dir)))
    return handle


def _say_handle(handle: str, parcel: Parcel, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"handle": handle, "run_id": parcel.request.run_id, "run_dir": parcel.request.run_dir}))
    else:
        print(handle)


def _follow(handle: str, parcel: Parcel, backend: Backend, as_json: bool) -> int:
    import sys

    from orchestrator.cli.terminal import style
    from orchestrator.launch.follow import follow
    from orchestrator.launch.run_folder import RunFolder

    out = sys.stderr if as_json else sys.stdout
    print(handle, file=out, flush=True)
    try:
        state = follow(RunFolder(Path(parcel.request.run_dir)), backend, out, style())
    except KeyboardInterrupt:
        print(f"\nThe run goes on. See it: orch status {handle}   End it: orch cancel {handle}", file=out)
        raise
    if as_json:
        import msgspec

        print(msgspec.json.encode(state).decode())
    return state.exit_code or 0
