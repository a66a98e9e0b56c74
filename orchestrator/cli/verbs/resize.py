"""`orch resize <run> <nodes>`: lets an elastic run save and continue on another number of nodes."""

from __future__ import annotations

import argparse

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument(
        "nodes",
        type=int,
        help="one of the sizes that `orch plan nodes=A..B` shows",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import os

    from orchestrator.backends.base import Resizing
    from orchestrator.cli.session import open_run, request_of_run

    folder, backend = open_run(args.run)
    if not isinstance(backend, Resizing):
        message = (
            f"backend {backend.name} has no manual resize: its elastic runs (nodes=A..B) follow"
            " their nodes"
        )
        raise OrchError(message, Exit.USAGE)
    if backend.state(folder).state == "done":
        raise OrchError(f"run {folder.run_id} is done: there are no steps left")
    request = request_of_run(folder)
    if args.nodes not in request.sizes:
        legal = ", ".join(map(str, sorted(request.sizes)))
        reason = (
            f"legal: {legal}" if legal else "it was submitted for one size, not with nodes=A..B"
        )
        raise OrchError(
            f"run {folder.run_id} cannot have {args.nodes} nodes: {reason}", Exit.CONFIG
        )
    handle = backend.resize(folder, request, args.nodes, os.environ)
    if args.json:
        import json

        print(
            json.dumps(
                {
                    "handle": handle,
                    "run_id": folder.run_id,
                    "nodes": args.nodes,
                }
            )
        )
    else:
        print(handle)
    return Exit.DONE
