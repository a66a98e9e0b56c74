"""Real trainer workers for tests: processes forked from this one, which has torch in memory, that
run `trainer.__main__.main` with the environment an agent would give them. What they report goes to
files."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from orchestrator.plan import Plan, to_json
from orchestrator.plan.worker import EventReport, ProgressReport, Report, StepReport, WorkerEnv
from orchestrator.run.store_socket import StoreSocket
from tests.beds.held import sitecustomize as hold
from tests.patience import PATIENCE_S
from trainer.__main__ import main
from trainer.huge_pages import collapse
from trainer.preload import prepare as _in_memory_before_the_fork  # noqa: F401
from trainer.train import Run


def worker_env(plan: Plan, rank: int, /, **changes: object) -> WorkerEnv:
    seat = plan.ranks[rank]
    values: dict = {
        "rank": rank,
        "local_rank": seat.gpu,
        "world_size": plan.parallel.world_size,
        "local_world_size": plan.cluster.gpus_per_node,
        "node_rank": plan.cluster.node_names.index(seat.node),
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "run_id": "test",
        "epoch": 0,
        "node": seat.node,
        "plan": "plan.json",
        "plan_hash": plan.hash,
        "run_dir": ".",
        "report_fd": None,
    }
    return WorkerEnv(**(values | changes))


class Workers:
    """All ranks of one epoch of a run. Files in `run_dir`: plan.json, rank-N.log, rank-N.jsonl.

    `held`: the step that no rank makes before `release`, or before it got a termination signal.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        epoch: int = 0,
        changes: Mapping[int, dict] | None = None,
        held: int | None = None,
    ):
        self.plan = plan
        self.run_dir = run_dir
        self.epoch = epoch
        self.held = held
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "plan.json").write_bytes(to_json(plan))
        self._store = StoreSocket("127.0.0.1", listens=False)
        port = self._store.port
        collapse()
        gc.freeze()
        self.pids = [
            self._start(rank, port, (changes or {}).get(rank, {}))
            for rank in range(plan.parallel.world_size)
        ]
        gc.unfreeze()
        self.codes: dict[int, int] = {}

    def _start(self, rank: int, port: int, changes: dict) -> int:
        for old in (self.reports_of(rank), self.log_of(rank)):
            old.unlink(missing_ok=True)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parent:
                os._exit(1)
            log = os.open(self.log_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")  # pytest has put its own in their place
            fd = os.open(self.reports_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            values = {
                "master_port": port,
                "epoch": self.epoch,
                "report_fd": fd,
                "run_dir": str(self.run_dir),
            }
            values |= {"plan": str(self.run_dir / "plan.json"), **changes}
            os.environ.update(worker_env(self.plan, rank, **values).variables())
            torch.set_num_threads(1)
            if self.held is not None:
                os.environ[hold.VARIABLE] = str(self.held)
                Run._agree = hold.held(Run._agree)
            main([])
        finally:
            os._exit(99)

    def release(self) -> None:
        """Let the ranks go on that wait before the held step."""
        assert self.held is not None
        hold.release(self.run_dir, self.held)

    def reports_of(self, rank: int) -> Path:
        return self.run_dir / f"rank-{rank}.e{self.epoch}.jsonl"

    def log_of(self, rank: int) -> Path:
        return self.run_dir / f"rank-{rank}.e{self.epoch}.log"

    def wait(self, timeout: float = PATIENCE_S) -> list[int]:
        """Exit codes by rank, negative for signals. Kills what is left at the end of the time, and
        fails."""
        deadline = time.monotonic() + timeout
        while len(self.codes) < len(self.pids) and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.01)
        late = [rank for rank in range(len(self.pids)) if rank not in self.codes]
        self.end()
        assert not late, (
            f"ranks {late} did not end in {timeout} s; rank {late[0]} said: {self.log(late[0])}"
        )
        return [self.codes[rank] for rank in range(len(self.pids))]

    def _collect(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(done[1])

    def end(self) -> None:
        self._store.close()
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def until(self, rank: int, seen: str | int, timeout: float = PATIENCE_S) -> None:
        """Wait until `rank` has reported the event named `seen`, or step number `seen`."""
        deadline = time.monotonic() + timeout
        over = False
        while not over:
            self._collect()
            over = rank in self.codes or time.monotonic() > deadline
            for report in self.reports(rank):
                if (report.step if isinstance(report, StepReport) else report.name) == seen:
                    return
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} never reported {seen!r}: {self.log(rank)}")

    def reports(self, rank: int = 0) -> list[StepReport | EventReport]:
        """Its step and event reports."""
        path = self.reports_of(rank)
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        decoded = [msgspec.json.decode(line, type=Report) for line in lines]
        return [report for report in decoded if not isinstance(report, ProgressReport)]

    def steps(self, rank: int = 0) -> list[StepReport]:
        return [report for report in self.reports(rank) if isinstance(report, StepReport)]

    def events(self, name: str, rank: int = 0) -> list[EventReport]:
        return [r for r in self.reports(rank) if isinstance(r, EventReport) and r.name == name]

    def losses(self) -> dict[int, float]:
        """Step -> loss, from whichever ranks have it; they must agree to the bit."""
        losses_by_step: dict[int, float] = {}
        for rank in range(len(self.pids)):
            for step in self.steps(rank):
                if step.loss is not None:
                    assert losses_by_step.setdefault(step.step, step.loss) == step.loss
        return losses_by_step

    def log(self, rank: int) -> str:
        return self.log_of(rank).read_text() if self.log_of(rank).exists() else ""


@contextlib.contextmanager
def running(*args: Any, **options: Any) -> Iterator[Workers]:
    """Workers that are gone when the block is left, however it is left."""
    workers = Workers(*args, **options)
    try:
        yield workers
    finally:
        workers.end()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
