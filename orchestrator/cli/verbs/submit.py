"""`orch submit`: plan a job, render its launch request, send it. `--dry-run` shows that request and sends nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.config.schema import Config
    from orchestrator.plan import Plan
    from orchestrator.run.request import SubmissionBundle
    from orchestrator.submit.candidates import Offer

HELP = "plan a job and start it; prints its handle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show plan and request, start and write nothing")
    parser.add_argument("--follow", "-f", action="store_true", help="watch it; ends with the run's exit code")
    parser.add_argument("--multirun", "-m", action="store_true", help="a run for every combination of key=a,b")
    add_request_arguments(parser)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What `prepare` reads, for every verb that makes a request."""
    parser.add_argument("--env", metavar="NAME", action="append", default=[], help="pass this variable on; repeatable")
    parser.add_argument("--in-place", action="store_true", help="run the program here, not in a copy of this folder")
    parser.add_argument("--run-id", metavar="ID", help="instead of <name>-<time>-<random>")
    after = "start when that run has ended well (any:RUN in any way, notok:RUN not well); repeatable"
    parser.add_argument("--after", metavar="RUN", action="append", default=[], help=after)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os
    import sys

    from orchestrator.run.folder import home_folder

    if args.multirun:
        from orchestrator.submit import sweep

        return sweep.run(args, overrides)
    home = home_folder(os.environ)
    backend, offers = prepare(args, overrides, home)
    from orchestrator.submit.candidates import choose, preview

    if args.dry_run:
        offer, said = preview(offers, backend, os.environ)
        return show(offer.bundle, offer.plan, backend, args.json, said)
    check_memory(args, offers[0])
    offer, said = choose(offers, backend, os.environ)
    handle = send(offer.bundle, backend, home)
    for line in said:
        print(f"orch: {line}", file=sys.stderr)
    if not args.follow:
        _say_handle(handle, offer.bundle, args.json)
        return Exit.DONE
    return follow_run(handle, offer.bundle, backend, args.json)


def prepare(
    args: argparse.Namespace, overrides: list[str], home: Path, member: str = ""
) -> tuple[Backend, list[Offer]]:
    """The backend, and what it is offered: one request, or one for each size of an elastic job.

    `member`: the run's id is that of a sweep, its name and this.
    """
    import time

    from msgspec import structs

    from orchestrator.backends.base import Prefetching, Queueing, get_backend
    from orchestrator.config.compose import load
    from orchestrator.run.folder import new_run_id
    from orchestrator.submit.cluster import ClusterResolver, at_home

    resolve = ClusterResolver(home)
    given = load(overrides, args.config_dir, ranges=True)
    config = at_home(given, home)
    backend = get_backend(config.backend.name)
    if args.after:
        from orchestrator.submit.candidates import parse_after

        wishes = parse_after(args.after, home)
        if not isinstance(backend, Queueing):
            raise OrchError(f"--after: the backend {backend.name} has no queue in which a run could wait", Exit.USAGE)
        options = backend.after(config.backend.options, wishes)
        config = structs.replace(config, backend=structs.replace(config.backend, options=options))
    config = resolve.leave_out(config, backend)
    if isinstance(backend, Prefetching) and not getattr(args, "dry_run", True):  # `orch render` sends nothing either
        backend.look_ahead(config)
    from orchestrator.submit.candidates import make_offers  # while the cluster answers

    if member:
        run_id = member if args.run_id else f"{_name(config)}{member}"
    else:
        run_id = args.run_id if args.run_id is not None else new_run_id(_name(config), time.time())
    args = argparse.Namespace(**{**vars(args), "run_id": run_id})

    def bundle(at: Config, plan: Plan, sizes: Mapping[int, Plan]) -> SubmissionBundle:
        return make_bundle(args, structs.replace(at, data=given.data), plan, backend, home, sizes)

    return backend, make_offers(config, resolve, bool(args.command), bundle)


def check_memory(args: argparse.Namespace, offer: Offer) -> None:
    plan = offer.plan
    if not args.command and plan.memory.total > plan.memory.capacity and not offer.config.run.allow_oom:
        raise OrchError(_too_large(plan), Exit.CONFIG)


def _name(config: Config) -> str:
    return config.run.name or "-".join(filter(None, (config.model.name, config.choices.get("parallel"))))


def make_bundle(
    args: argparse.Namespace,
    config: Config,
    plan: Plan,
    backend: Backend,
    home: Path,
    sizes: Mapping[int, Plan] = MappingProxyType({}),
) -> SubmissionBundle:
    """Gather the facts of this shell and render the request."""
    import os
    import sys
    import time

    from orchestrator.run.code_snapshot import find_code
    from orchestrator.run.folder import new_run_id
    from orchestrator.run.registry import runs_folder
    from orchestrator.run.request import Code, Site, make_request

    runs = Path(config.run.dir).expanduser().absolute() if config.run.dir else runs_folder(home)
    cwd = Path.cwd()
    site = Site(
        run_id=args.run_id if args.run_id is not None else new_run_id(_name(config), time.time()),
        home=str(home),
        runs_dir=str(runs),
        python=sys.executable,
        environment_names=sorted(os.environ),
        cwd=str(cwd),
        code=Code(kind="none") if args.in_place else find_code(cwd, wanted=bool(args.command)),
        agent_flags=list(backend.agent_flags),
    )
    return make_request(config, plan, site, args.command or (), args.env, sizes)


def _too_large(plan: Plan) -> str:
    need, have = plan.memory.total / 2**30, plan.memory.capacity / 2**30
    where = f"rank {plan.memory.worst_rank} needs {need:.1f} GiB of {have:.1f} GiB"
    return f"the plan does not fit: {where}; `orch plan` shows what takes it, run.allow_oom=true submits it anyway"


def show(bundle: SubmissionBundle, plan: Plan, backend: Backend, as_json: bool, said: Sequence[str] = ()) -> int:
    from orchestrator.backends.base import Rendering
    from orchestrator.run.request import to_bytes

    if as_json:
        print(to_bytes(bundle.request).decode(), end="")
        return Exit.DONE
    from orchestrator.cli.terminal import style
    from orchestrator.observe.pages.plan_page import render
    from orchestrator.observe.pages.run_page import request_page

    look = style()
    print(render(plan, look), request_page(bundle.request, look), sep="\n\n")
    print("", *said, sep="\n")
    print("Nothing was started or written. `--dry-run --json` prints the request as it would be sent.")
    try:
        backend.check(bundle.request)
        if isinstance(backend, Rendering):  # what its scheduler would be given
            print("", backend.script(bundle.request, plan), sep="\n", end="")
    except OrchError as error:
        print(f"Submitting it here would be refused: {error.message}")
    return Exit.DONE


def send(bundle: SubmissionBundle, backend: Backend, home: Path) -> str:
    import os

    from orchestrator.run.folder import RunFolder
    from orchestrator.run.registry import register

    os.umask(0o077)
    handle = backend.submit(bundle, os.environ)
    register(home, RunFolder(Path(bundle.request.run_dir)))
    return handle


def _say_handle(handle: str, bundle: SubmissionBundle, as_json: bool) -> None:
    if as_json:
        from msgspec import json

        said = {"handle": handle, "run_id": bundle.request.run_id, "run_dir": bundle.request.run_dir}
        print(json.format(json.encode(said), indent=0).decode())
    else:
        print(handle)


def follow_run(handle: str, bundle: SubmissionBundle, backend: Backend, as_json: bool) -> int:
    import sys

    from orchestrator.cli.terminal import style
    from orchestrator.observe.follow import follow
    from orchestrator.run.folder import RunFolder

    out = sys.stderr if as_json else sys.stdout
    print(handle, file=out, flush=True)
    try:
        state = follow(RunFolder(Path(bundle.request.run_dir)), backend.state, out, style())
    except KeyboardInterrupt:
        print(f"\nThe run goes on. See it: orch status {handle}   End it: orch cancel {handle}", file=out)
        raise
    if as_json:
        import msgspec

        print(msgspec.json.encode(state).decode())
    return state.exit_code or 0
