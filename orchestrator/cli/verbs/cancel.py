"""`orch cancel <run>`: end a run. Its workers save first; `--force` does not wait for that."""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_LOOK_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument("--force", action="store_true", help="kill it at once, nothing is saved")
    parser.add_argument("--no-wait", action="store_true", help="return when it has been asked")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    from orchestrator.cli.session import open_run
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.observe.pages.run_page import end_lines

    folder, backend = open_run(args.run)
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
        print_json(state)
    elif args.no_wait:
        print(f"asked {folder.run_id} to end; orch status {folder.run_id}")
    else:
        print("\n".join(end_lines(state, style())))
    return Exit.DONE
