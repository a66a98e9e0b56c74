"""`orch resume <run>`: start an ended run once more, in its folder, from its last checkpoint, as the next epoch."""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument("--follow", "-f", action="store_true", help="watch it; ends with the run's exit code")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os

    from orchestrator.cli.session import open_run, request_of_run

    folder, backend = open_run(args.run)
    alive = backend.is_alive(folder)
    state = backend.state(folder)
    if alive:
        raise OrchError(f"run {folder.run_id} is {state.state}: cancel it first, or wait for its end")
    if state.state == "done":
        raise OrchError(f"run {folder.run_id} is done: there is nothing left to do")
    request = request_of_run(folder)
    os.umask(0o077)
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
