"""`orch cancel <run>`: end a run. Its workers save first; `--force` does not wait for that."""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

HELP = "stop a run after it has saved"
_LOOK_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument("--force", action="store_true", help="kill it at once, nothing is saved")
    parser.add_argument("--no-wait", action="store_true", help="return when it has been asked")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os
    import time

    from orchestrator.backends.base import get_backend
    from orchestrator.cli.terminal import style
    from orchestrator.observe.pages.run_page import end_lines
    from orchestrator.run.folder import home_folder
    from orchestrator.run.registry import find_run
    from orchestrator.run.state import read_state

    folder = find_run(home_folder(os.environ), args.run)
    backend = get_backend(read_state(folder).backend)
    state = backend.state(folder)
    if state.is_final:
        raise OrchError(f"run {folder.run_id} has ended: {state.state}")
    backend.cancel(folder, args.force)
    while not args.no_wait:
        alive = backend.is_alive(folder)
        state = backend.state(folder)
        if not alive:
            break
        time.sleep(_LOOK_S)
    if args.json:
        import msgspec

        print(msgspec.json.encode(state).decode())
    elif args.no_wait:
        print(f"asked {folder.run_id} to end; orch status {folder.run_id}")
    else:
        print("\n".join(end_lines(state, style())))
    return Exit.DONE
