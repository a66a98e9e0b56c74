"""`orch nodes`: lists the bad nodes that runs have recorded. Later runs avoid them until the
records expire or are removed."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="NAME", help="only nodes of this cluster")
    parser.add_argument(
        "--forget",
        metavar="NODE",
        action="append",
        default=[],
        help="use this node again; repeatable",
    )
    parser.add_argument("--forget-all", action="store_true", help="use all nodes again")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import time

    from orchestrator.cli.session import home
    from orchestrator.cli.terminal import print_json, style
    from orchestrator.observe.pages.run_page import nodes_page
    from orchestrator.run.bad_nodes import NodeMemory

    memory = NodeMemory(home())
    now = time.time()
    if args.forget or args.forget_all:
        listed_nodes = {entry.node for entry in memory.read(now, args.cluster)}
        names = (
            listed_nodes
            if args.forget_all
            else {_known_name(name, listed_nodes) for name in args.forget}
        )
        memory.forget(
            now,
            lambda entry: entry.node in names and args.cluster in (None, entry.cluster),
        )
    entries = memory.read(now, args.cluster)
    if args.json:
        print_json({"nodes": entries})
    else:
        print(nodes_page(entries, now, style()))
    return Exit.DONE


def _known_name(name: str, listed_nodes: Collection[str]) -> str:
    """Returns the listed node that the name means. One of the two names may be the host name of the
    other (`node1` and `node1.example.com`).

    Raises OrchError (64) if the name means no node, or several.
    """
    from orchestrator.errors import did_you_mean

    if name in listed_nodes:
        return name
    candidates = [
        node
        for node in sorted(listed_nodes)
        if node.split(".")[0] == name or name.split(".")[0] == node
    ]
    if len(candidates) > 1:
        raise OrchError(
            f"node {name!r} may be any of {', '.join(candidates)}: give the full name", Exit.USAGE
        )
    if not candidates:
        raise OrchError(
            f"no node {name!r} is on the list of bad nodes; {did_you_mean(name, listed_nodes)}",
            Exit.USAGE,
        )
    return candidates[0]
