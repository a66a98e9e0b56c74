"""`orch resume <run>`: start an ended run once more, in its folder, from its last checkpoint, as the next epoch."""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

HELP = "continue a stopped run from its last checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument("--follow", "-f", action="store_true", help="watch it; ends with the run's exit code")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os
    import sys

    from orchestrator.backends.base import get_backend
    from orchestrator.run.folder import home_folder
    from orchestrator.run.registry import find_run
    from orchestrator.run.request import read_request
    from orchestrator.run.state import read_state

    folder = find_run(home_folder(os.environ), args.run)
    backend = get_backend(read_state(folder).backend)
    alive = backend.is_alive(folder)
    state = backend.state(folder)
    if alive:
        raise OrchError(f"run {folder.run_id} is {state.state}: cancel it first, or wait for its end")
    if state.state == "done":
        raise OrchError(f"run {folder.run_id} is done: there is nothing left to do")
    request = read_request(folder)
    os.umask(0o077)
    handle = backend.resume(folder, request, os.environ)
    if args.follow:
        from orchestrator.cli.terminal import style
        from orchestrator.observe.follow import follow

        out = sys.stderr if args.json else sys.stdout
        print(handle, file=out, flush=True)
        state = follow(folder, backend.state, out, style())
        if args.json:
            import msgspec

            print(msgspec.json.encode(state).decode())
        return state.exit_code or 0
    if args.json:
        import json

        print(json.dumps({"handle": handle, "run_id": folder.run_id, "run_dir": str(folder.path)}))
    else:
        print(handle)
    return Exit.DONE
