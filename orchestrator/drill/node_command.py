"""`python -m orchestrator.drill.node_command`: injects one fault on the node where it runs.

`orch drill` starts it there by the means that a cluster gives the run's owner: a step of the job
(Slurm), exec into the pod (Kubernetes). It prints one line, the time of the injection or why
there was none, waits until its standard input is closed or `--limit-s` have passed, and undoes
the fault. So nothing stays broken after its caller is gone.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from pathlib import Path

import msgspec

from orchestrator import start
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, PlanError
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.document import Frozen
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, identity
from orchestrator.run.request import read_request

from .faults import KINDS
from .node_faults import NodeProcesses, no_undo


class Reply(Frozen):
    """The line that the command prints."""

    exit: int = 0
    problem: str = ""
    at: float = 0.0  # just before the injection, by this node's clock


def arguments(
    folder: str,
    agent: int,
    fault: str,
    rank: int,
    for_s: float,
    pick: float,
    limit_s: float,
) -> list[str]:
    """Returns the command line after `python -P`."""
    options = {"run-dir": folder, "agent": agent, "fault": fault, "rank": rank}
    options |= {"for-s": f"{for_s:g}", "pick": f"{pick:.6f}", "limit-s": f"{limit_s:g}"}
    return [
        *start.BY_NAME,
        "orchestrator.drill.node_command",
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def injected_at(line: bytes) -> float:
    """Returns Unix seconds of the injection, from the printed line. OrchError if there was none."""
    try:
        answer = msgspec.json.decode(line, type=Reply)
    except UNREADABLE:
        problem = f"the node's answer cannot be read: {line[:200]!r}"
        raise OrchError(problem, Exit.CAPACITY) from None
    if answer.problem:
        raise OrchError(answer.problem, Exit(answer.exit))
    return answer.at


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    folder = RunFolder(args.run_dir)
    at = time.time()
    try:
        check_allowed(folder)
        undo = NodeProcesses(folder, agent_of(folder, args.agent)).inject(
            args.fault,
            args.rank,
            args.for_s,
            args.pick,
        )
    except OrchError as error:
        return _print(Reply(exit=int(error.exit), problem=error.message))
    except (OSError, PlanError) as error:
        return _print(Reply(exit=int(Exit.CAPACITY), problem=f"{args.fault}: {error}"))
    try:
        _print(Reply(at=at))
        if undo is not no_undo:
            _wait(args.limit_s)
    finally:
        undo()
    return Exit.DONE


def check_allowed(folder: RunFolder) -> None:
    """Raises OrchError (78) for a run that was submitted without permission for drills."""
    if not read_request(folder).policy.allow_drills:
        raise OrchError("the run was submitted without backend.allow_drills=true", Exit.SECURITY)


def agent_of(folder: RunFolder, pid: int) -> Identity:
    """Returns the agent of this run that has that pid here. OrchError (76) if it has ended, or
    another process has the pid."""
    process = identity(pid)
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        argv = []
    belongs_to_run = pid == 1 or os.fsencode(folder.path) in argv  # a pod runs one run only
    if (
        process is None
        or not belongs_to_run
        or not any(argument.startswith(b"orchestrator.") for argument in argv)
    ):
        raise OrchError(f"process {pid} is not an agent of run {folder.run_id}", Exit.CAPACITY)
    return process


def _print(answer: Reply) -> int:
    print(msgspec.json.encode(answer).decode(), flush=True)
    return answer.exit


def _wait(limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while (remaining := end - time.monotonic()) > 0:
        readable, _, _ = select.select([sys.stdin], [], [], remaining)
        if readable and not os.read(sys.stdin.fileno(), 512):
            return


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchestrator.drill.node_command")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument(
        "--agent",
        required=True,
        type=int,
        help="its pid on this node",
    )
    parser.add_argument(
        "--fault",
        required=True,
        choices=sorted(KINDS.keys() - {"partition"}),
    )
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--for-s", type=float, default=5.0)
    parser.add_argument("--pick", type=float, default=0.0)
    parser.add_argument(
        "--limit-s",
        type=float,
        default=120.0,
        help="after which the fault is undone in any case",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
