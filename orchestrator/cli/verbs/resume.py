"""`orch resume <run>`: start an ended run once more, in its folder, from its last checkpoint, as the next epoch."""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.plan.worker import PINS, pin_file

_END_S = 10.0  # for the last processes of a run that has ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument(
        "--allow",
        action="append",
        choices=tuple(PINS),
        default=[],
        help="changed-data: go on with another text than the run began with; fresh-start: from step 0, if all its"
        " checkpoints are gone",
    )
    parser.add_argument("--follow", "-f", action="store_true", help="watch it; ends with the run's exit code")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os
    import time

    from orchestrator.cli.session import open_run, request_of_run

    folder, backend = open_run(args.run)
    end = time.monotonic() + _END_S
    while True:
        alive = backend.is_alive(folder)  # first: what has ended in between has written its state
        state = backend.state(folder)
        if state.state == "done":
            raise OrchError(f"run {folder.run_id} is done: there is nothing left to do")
        if not alive or not state.is_final or time.monotonic() > end:
            break
        time.sleep(0.1)  # it has said how it ended, and its last processes are going
    if alive:
        raise OrchError(f"run {folder.run_id} is {state.state}: cancel it first, or wait for its end")
    request = request_of_run(folder)
    os.umask(0o077)
    for name in args.allow:
        pin_file(folder.path, PINS[name]).unlink(missing_ok=True)
    handle = backend.resume(folder, request, os.environ)
    if args.follow:
        from orchestrator.cli.terminal import follow_run

        return follow_run(handle, folder, backend, args.json)
    if args.json:
        import json

        print(json.dumps({"handle": handle, "run_id": folder.run_id, "run_dir": str(folder.path)}))
    else:
        print(handle)
    return Exit.DONE
