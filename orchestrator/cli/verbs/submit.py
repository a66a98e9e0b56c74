"""`orch submit`: plan a job, render its launch request, send it. `--dry-run` shows that request and
sends nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.session import add_request_arguments, submit_options
from orchestrator.cli.streams import announce
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
        "--dry-run", action="store_true", help="show plan and request, start and write nothing"
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="watch it; ends with the run's exit code"
    )
    parser.add_argument(
        "--multirun",
        "-m",
        action="store_true",
        help=(
            "a run for every combination of key=a,b; a value with commas stands in quotes:"
            " key='a,b',c"
        ),
    )
    parser.set_defaults(owned=False)
    add_request_arguments(parser)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from msgspec import json

    from orchestrator.api import prepare_job
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.run.left_out import describe_left_out

    options = submit_options(args, args.dry_run, overrides)
    if args.multirun:
        return _sweep(args, overrides, options)
    job = prepare_job(overrides, options, args.config_dir)
    bundle = job.candidate.bundle
    backend = job.backend
    said = [*job.said, *vars(args).get("said", [])]  # those of orch run
    if args.dry_run:
        return _show(bundle, job.candidate.plan, backend, args.json, said)
    for line in describe_left_out(bundle.request.code):
        print(f"orch: {line}", file=sys.stderr)
    with HeldSignals() as signals:
        sent = job.send(options)
        for line in said:
            print(f"orch: {line}", file=sys.stderr)
        if args.follow:
            from orchestrator.cli.terminal import follow_run

            return follow_run(sent.handle, sent.folder, backend, args.json, signals, args.owned)
        found = {"handle": sent.handle, "run_id": sent.id, "run_dir": str(sent.folder.path)}
        announce(
            json.format(json.encode(found), indent=0).decode() if args.json else sent.handle,
            sys.stdout,
        )
    return Exit.DONE


def _show(
    bundle: SubmissionBundle, plan: Plan, backend: Backend, as_json: bool, said: Sequence[str] = ()
) -> int:
    from orchestrator.backends.base import Rendering
    from orchestrator.run.request import to_bytes

    if as_json:
        for line in said:
            print(f"orch: {line}", file=sys.stderr)
        print(to_bytes(bundle.request).decode(), end="")
        return Exit.DONE
    from orchestrator.cli.terminal import style
    from orchestrator.observe.pages.plan_page import render
    from orchestrator.observe.pages.run_page import request_page
    from orchestrator.style import fold

    look = style()
    print(render(plan, look), request_page(bundle.request, look), sep="\n\n")
    print("", *(part for line in said for part in fold(line, look.width)), sep="\n")
    print("Nothing was started or written. `--dry-run --json` prints what would be sent.")
    try:
        backend.check(bundle.request)
        if isinstance(backend, Rendering):  # what its scheduler would be given
            print("", backend.script(bundle.request, plan), sep="\n", end="")
    except OrchError as error:
        print(f"Submitting it here would be refused: {error.message}")
    return Exit.DONE


def _sweep(args: argparse.Namespace, overrides: list[str], options: SubmitOptions) -> int:
    """A scheduler gets all runs together. This machine has no queue: they follow one another,
    watched."""
    from orchestrator.config.sweep import members
    from orchestrator.run.held_signals import HeldSignals
    from orchestrator.run.left_out import describe_left_out
    from orchestrator.submit.sweep import prepare_sweep, send_sweep
    from orchestrator.submit.this_machine import load_job

    if args.follow:
        raise OrchError(
            "--follow watches one run; see those of a sweep with orch list and orch status"
        )
    backend, runs = prepare_sweep(
        members(overrides), lambda words: load_job(words, options, args.config_dir), options
    )
    if args.dry_run:
        return _show_sweep(backend, runs, args.json)
    said = [line for run in runs for line in run.said]
    for line in dict.fromkeys([*describe_left_out(runs[0].bundle.request.code), *said]):
        print(f"orch: {line}", file=sys.stderr)
    if backend.on_this_machine:
        return _one_after_another(backend, runs, options, args.json)
    with HeldSignals():
        handles = send_sweep(backend, runs, options)
        if args.json:
            import json

            requests = [(run.bundle.request, run.label) for run in runs]
            about = [
                {
                    "handle": request.handle,
                    "run_id": request.run_id,
                    "run_dir": request.run_dir,
                    "sweep": label,
                }
                for request, label in requests
            ]
            announce(json.dumps(about), sys.stdout)
        else:
            announce(
                "\n".join(
                    f"{handle}  {one.label}" for handle, one in zip(handles, runs, strict=True)
                ),
                sys.stdout,
            )
    return Exit.DONE


def _show_sweep(backend: Backend, runs: Sequence[SweepRun], as_json: bool) -> int:
    if as_json:
        from orchestrator.run.request import to_bytes

        print(
            "[" + ",\n".join(to_bytes(run.bundle.request).decode().rstrip() for run in runs) + "]"
        )
        return Exit.DONE
    for run in runs:
        print(f"==> {run.label}")
        _show(run.bundle, run.candidate.plan, backend, as_json=False, said=run.said)
    return Exit.DONE


def _one_after_another(
    backend: Backend, runs: Sequence[SweepRun], options: SubmitOptions, as_json: bool
) -> int:
    """Each run watched to its end before the next starts; the exit code of the first that
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
            codes.append(follow_run(handle, folder, backend, as_json, signals))
    return next(filter(None, codes), Exit.DONE)
