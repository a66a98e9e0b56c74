"""`python -m tests.independent.start_ranks` runs the ranks of whole jobs on this machine, one job
after the other.

Like an agent's fork server, it imports `trainer` once and forks its workers, which call
`trainer.__main__.main` as `python -m trainer` does. It reads one job per line: the plan, and the
environment, log and reports of each rank. It prints the exit codes of the ranks. Ranks that do not
end in time are killed, and their code is -9.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

from orchestrator.run.processes import die_with_parent

#: Seconds for all ranks of a job. Even small jobs take some on a busy machine.
TIMEOUT_S = 300.0


def main() -> int:
    preload = importlib.import_module("trainer.preload")
    program = importlib.import_module("trainer.__main__")
    for line in sys.stdin:
        job = json.loads(line)
        preload.prepare(["--plan", job["plan"]], os.environ)
        pids = [_start(rank, preload, program, job["plan"]) for rank in job["ranks"]]
        print(json.dumps(_wait(pids)), flush=True)
    return 0


def _start(rank: dict[str, Any], preload: Any, program: Any, plan: str) -> int:
    """Forks a worker and returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    return pid or _work(rank, parent, preload, program, plan)


def _work(rank: dict[str, Any], parent: int, preload: Any, program: Any, plan: str) -> NoReturn:
    """Runs the trainer in the forked worker."""
    try:
        die_with_parent(parent)
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stdin = os.open(os.devnull, os.O_RDONLY)
        for source, number in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, number)
        report = os.open(rank["reports"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.environ.update(rank["environment"] | {"ORCH_REPORT_FD": str(report)})
        preload.after_fork()
        program.main(["--plan", plan])
    finally:
        os._exit(99)


def _wait(pids: list[int]) -> list[int]:
    """Waits for the workers, kills those that do not end in time, and returns their exit codes."""
    codes = dict[int, int]()
    deadline = time.monotonic() + TIMEOUT_S
    while len(codes) < len(pids):
        running = [pid for pid in pids if pid not in codes]
        for pid in running:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in running:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
            deadline += TIMEOUT_S
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    sys.exit(main())
