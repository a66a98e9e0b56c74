"""`orch logs [run]`: prints the output of the workers, or of the agents with `--agents`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.run.folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        help="handle, id, or the beginning of one (default: the newest run)",
    )
    follow_help = "print new lines until the run has ended"
    parser.add_argument("--follow", "-f", action="store_true", help=follow_help)
    parser.add_argument(
        "--rank",
        type=int,
        metavar="N",
        action="append",
        help="only this rank; repeatable",
    )
    parser.add_argument("--node", metavar="NAME", help="only the ranks of this node")
    parser.add_argument(
        "--agents",
        action="store_true",
        help="the logs of the agents, not of the workers",
    )
    parser.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="only the last N lines of each log",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.api import Run

    if args.tail is not None and args.tail < 0:
        raise OrchError(f"--tail {args.tail}: must be a number of lines, at least 0")
    job = Run.find(args.run)
    sources = dict[str, Path]()

    def logs() -> dict[str, Path]:
        sources.update(_sources(args, job.folder))
        return sources

    for name, line in job.lines(logs, args.tail, args.follow):
        _print_line(name, line, alone=len(sources) == 1, as_json=args.json)
    return Exit.DONE


def _print_line(name: str, line: str, alone: bool, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"from": name, "line": line}), flush=True)
    else:
        print(line if alone else f"[{name}] {line}", flush=True)


def _sources(args: argparse.Namespace, folder: RunFolder) -> list[tuple[str, Path]]:
    """Returns (name, file) of every requested log. Raises OrchError (64) for a rank or a node that
    the run does not have."""
    from orchestrator.api.run import nodes_of_ranks, rank_logs
    from orchestrator.errors import did_you_mean
    from orchestrator.run.state import read_state

    nodes = list(dict.fromkeys(nodes_of_ranks(folder).values()))
    if args.node is not None and args.node not in nodes:
        raise OrchError(
            f"run {folder.run_id} has no node {args.node!r}; {did_you_mean(args.node, nodes)}"
        )
    logs = rank_logs(folder, args.rank or (), args.node or "")
    if args.agents:
        agent_logs = [
            (f"agent {node}", folder.agent_log(node)) for node in nodes if args.node in (None, node)
        ]
        local = folder.logs / "supervisor.log"
        if not args.node and local.exists():
            return [("supervisor", local), *agent_logs]
        return agent_logs
    if not args.rank and not any(path.exists() for path in rank_logs(folder).values()):
        # No worker has started: the log of the job has the reason.
        jobs = sorted(
            path for path in folder.logs.glob("*.log") if not path.name.startswith("agent-")
        )
        if jobs and read_state(folder).state in ("pending", "failed"):
            return [(path.stem, path) for path in jobs]
    return list(logs.items())
