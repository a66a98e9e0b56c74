"""`orch submit`: plans a job, renders its launch request and sends it. `--dry-run` shows the
request without sending it."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.session import add_request_arguments, submit_options
from orchestrator.cli.streams import announce
from orchestrator.cli.terminal import print_messages
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.plan import Plan
    from orchestrator.run.request import SubmissionBundle
    from orchestrator.submit.submission import SubmitOptions
    from orchestrator.submit.sweep import SweepRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the plan and the request, start nothing",
    )
    parser.add_argument(
        "--follow",
        "-f",
        action="store_true",
        help="watch the run, and exit with its exit code",
    )
    parser.add_argument(
        "--multirun",
        "-m",
        action="store_true",
        help=(
            "start a run for every combination of key=a,b; quote a value with commas: key='a,b',c"
        ),
    )
    parser.set_defaults(owned=False)
    add_request_arguments(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from msgspec import json

    from orchestrator.api import prepare_job
    from orchestrator.run.code.left_out import describe_copy
    from orchestrator.run.held_signals import HeldSignals

    options = submit_options(args, args.dry_run, overrides)
    if args.multirun:
        return _sweep(args, overrides, options)
    job = prepare_job(overrides, options, args.config_dir)
    bundle = job.candidate.bundle
    backend = job.backend
    cautions = [*job.cautions, *vars(args).get("messages", [])]  # orch run adds some
    if args.dry_run:
        lines = [*cautions, *job.messages]
        return _show(bundle, job.candidate.plan, backend, args.json, lines)
    if cautions:  # a refused job gets the line of its refusal alone
        backend.check_start(bundle.request, options.environ)
    print_messages([*describe_copy(bundle.request.code), *cautions])
    with HeldSignals() as signals:
        submitted = job.send(options)
        print_messages(job.messages)
        if args.follow:
            from orchestrator.cli.terminal import follow_run

            return follow_run(
                submitted.handle,
                submitted.folder,
                backend,
                as_json=args.json,
                signals=signals,
                owned=args.owned,
            )
        announcement = submitted.handle
        if args.json:
            document = {
                "handle": submitted.handle,
                "run_id": submitted.id,
                "run_dir": str(submitted.folder.path),
            }
            announcement = json.format(json.encode(document), indent=0).decode()
        announce(announcement, sys.stdout)
    return Exit.DONE


def _show(
    bundle: SubmissionBundle,
    plan: Plan,
    backend: Backend,
    as_json: bool,
    messages: Sequence[str] = (),
) -> int:
    """Prints the plan and the request of a dry run, and whether the backend would take it."""
    from orchestrator.backends.base import Rendering
    from orchestrator.run.request import to_bytes

    if as_json:
        print_messages(messages)
        print(to_bytes(bundle.request).decode(), end="")
        return Exit.DONE
    from msgspec import structs

    from orchestrator.cli.terminal import style
    from orchestrator.observe.pages.plan_page import render
    from orchestrator.observe.pages.request_page import request_page

    look = style()
    request = bundle.request
    with contextlib.suppress(OrchError):  # `check` says what is wrong with it
        nodes_request = backend.on_nodes(request, plan)
        request = structs.replace(request, agents=nodes_request.agents, worker=nodes_request.worker)
    print(render(plan, look), request_page(request, look), sep="\n\n")
    print(
        "",
        *(folded for line in messages for folded in look.fold(line)),
        sep="\n",
    )
    print("Nothing was started or written. `--dry-run --json` prints what would be sent.")
    try:
        backend.check(bundle.request)
        if isinstance(backend, Rendering):  # the job script for the scheduler
            print("", backend.script(bundle.request, plan), sep="\n", end="")
    except OrchError as error:
        refusal = f"This machine would refuse to submit it: {error.message}"
        print(*look.fold(refusal), sep="\n")
    return Exit.DONE


def _sweep(args: argparse.Namespace, overrides: list[str], options: SubmitOptions) -> int:
    """Submits all runs of a sweep to a scheduler. On this machine, which has no queue, the runs
    follow one another and are watched."""
    from orchestrator.config.sweep import members
    from orchestrator.run.code.left_out import describe_copy
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.submit.sweep import prepare_sweep, send_sweep
    from orchestrator.submit.this_machine import load_job

    if args.follow:
        raise OrchError(
            "--follow watches one run; use orch list and orch status for the runs of a sweep"
        )
    backend, runs = prepare_sweep(
        members(overrides),
        lambda run_overrides: load_job(run_overrides, options, args.config_dir),
        options,
    )
    if args.dry_run:
        return _show_sweep(backend, runs, args.json)
    messages = [line for run in runs for line in run.messages]
    print_messages([*describe_copy(runs[0].bundle.request.code), *messages])
    if backend.on_this_machine:
        return _one_after_another(backend, runs, options, args.json)
    with HeldSignals():
        handles = send_sweep(backend, runs, options)
        announce(_sweep_announcement(handles, runs, args.json), sys.stdout)
    return Exit.DONE


def _sweep_announcement(
    handles: Sequence[str],
    runs: Sequence[SweepRun],
    as_json: bool,
) -> str:
    """Returns the handle and the label of each run."""
    if not as_json:
        return "\n".join(
            f"{handle}  {run.label}" for handle, run in zip(handles, runs, strict=True)
        )
    import json

    requests = [(run.bundle.request, run.label) for run in runs]
    documents = [
        {
            "handle": request.handle,
            "run_id": request.run_id,
            "run_dir": request.run_dir,
            "sweep": label,
        }
        for request, label in requests
    ]
    return json.dumps(documents)


def _show_sweep(backend: Backend, runs: Sequence[SweepRun], as_json: bool) -> int:
    if as_json:
        from orchestrator.run.request import to_bytes

        print_messages(line for run in runs for line in run.messages)
        print(
            "[" + ",\n".join(to_bytes(run.bundle.request).decode().rstrip() for run in runs) + "]"
        )
        return Exit.DONE
    for run in runs:
        print(f"==> {run.label}")
        _show(
            run.bundle,
            run.candidate.plan,
            backend,
            as_json=False,
            messages=run.messages,
        )
    return Exit.DONE


def _one_after_another(
    backend: Backend,
    runs: Sequence[SweepRun],
    options: SubmitOptions,
    as_json: bool,
) -> int:
    """Starts each run after the end of the one before, and returns the exit code of the first that
    failed."""
    from orchestrator.cli.terminal import follow_run
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.submit.submission import send

    codes = []
    for index, run in enumerate(runs):
        out = sys.stderr if as_json else sys.stdout
        print(f"run {index + 1} of {len(runs)}: {run.label}", file=out, flush=True)
        with HeldSignals() as signals:
            handle = send(run.bundle, backend, options)
            folder = RunFolder(Path(run.bundle.request.run_dir))
            code = follow_run(
                handle,
                folder,
                backend,
                as_json=as_json,
                signals=signals,
            )
            codes.append(code)
    return next(filter(None, codes), Exit.DONE)
