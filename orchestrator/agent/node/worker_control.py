"""Starts, examines and stops a node's workers for the coordinator, and reports their ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from msgspec import structs

from orchestrator import start
from orchestrator.agent.protocol.messages import (
    Assign,
    Examine,
    FromAgent,
    Started,
    Stop,
    Stopped,
    Warm,
    WorkerExit,
)
from orchestrator.plan import Plan, PlanError, load_plan, meaning
from orchestrator.plan.worker import WorkerEnv
from orchestrator.run.code.left_out import explain
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, identity, send_signal
from orchestrator.run.request import LaunchRequest, Worker, used_nodes
from orchestrator.run.store_socket import StoreSocket

from .cpu_binding import bind, device_visibility, format_cpu_list
from .disk import Disk, append
from .fork_server import REPORT_FD, STORE_FD
from .printed_steps import PrintedSteps
from .recorder import Recorder
from .stacks import save_stack, size_of, tail_of
from .workers import Workers

log = logging.getLogger("orch.agent")


class WorkerControl:
    """Controls the workers of one node.

    `send` sends a message of the current epoch to the coordinator. `replans`: the plan in force may
    change. `root` is the root of the machine's own files.
    """

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        request: LaunchRequest,
        node: str,
        recorder: Recorder,
        send: Callable[[FromAgent], None],
        replans: bool,
        root: Path = Path("/"),
    ):
        self.plan = plan
        self._folder = folder
        self._worker = with_own_python(request.worker)
        self._node = node
        self._recorder = recorder
        self._send = send
        self._replans = replans
        self._code = request.code
        self._root = root
        self._max_restarts = request.policy.max_restarts
        self._store_filter = request.policy.store_filter
        self._workers = Workers(
            on_exit=self._on_exit,
            on_empty=self._on_empty,
            on_line=recorder.on_line,
            program=preloaded(self._worker),
            on_warm=self._on_warm,
            environment={"ORCH_PLAN": str(folder.plan)},
            on_started=lambda: self._send(Started()),
        )
        pattern = self._worker.pattern
        self._disk = Disk()
        self._printed_steps = (
            PrintedSteps(pattern, recorder.on_printed_step, self._disk) if pattern else None
        )
        self._report_queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._report_task: asyncio.Task[None] | None = None
        self._epoch = -1
        self._assigned = False  # workers of this epoch run
        self._log_starts: dict[int, int] = {}  # rank -> size of its log when this epoch began
        self._examinations: set[asyncio.Task] = set()
        self._store: StoreSocket | None = None  # of this epoch's rank 0

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> pid of the workers that are alive."""
        return self._workers.pids

    @property
    def warm(self) -> bool:
        return self._workers.warm

    def watch(self) -> None:
        """Checks the worker supervisor and the printed steps; to be called every half second."""
        if self._printed_steps:
            self._printed_steps.watch()
        if self._report_task and self._report_task.done():
            self._report_task.result()  # raises the error of a bug
        if outcome := self._workers.watch():
            log.error("%s", outcome)
            self._recorder.event("worker_supervisor_stopped", reason=outcome)

    @property
    def examination(self) -> asyncio.Task | None:
        """The stack dump in progress, or None."""
        return next(iter(self._examinations), None)

    def open(self) -> None:
        self._workers.open()
        self._report_task = asyncio.create_task(self._send_reports())

    def close(self) -> None:
        """Kills all workers and everything below them."""
        for task in (*self._examinations, self._report_task):
            if task:
                task.cancel()
        if self._printed_steps:
            self._printed_steps.close()
        self._workers.close()
        self._close_store()
        self._disk.close()

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, and kills workers of the last one, if any are left."""
        self._workers.kill()
        self._epoch = epoch
        self._assigned = False
        self._recorder.begin_epoch(epoch)
        if self._printed_steps:
            self._printed_steps.begin_epoch(epoch)

    def open_store(self, address: str) -> int:
        """Opens the socket of this epoch's store, in case rank 0 runs here; returns its port."""
        self._close_store()
        self._store = StoreSocket(address, self._worker.bundled, self._store_filter)
        return self._store.port

    def _gets_store(self, rank: int) -> bool:
        return rank == 0 and self._store is not None and self._store.listens

    def _close_store(self) -> None:
        if self._store:
            self._store.close()
            self._store = None

    def on_disconnect(self) -> None:
        """Forgets the assignment of ranks of a coordinator that is gone."""
        self._assigned = False

    def kill(self) -> None:
        self._workers.kill()

    def terminate(self, grace_s: float) -> None:
        self._workers.stop(signal.SIGTERM, grace_s)

    def stop(self, order: Stop) -> None:
        log.warning("stopping: %s", order.reason)
        if self._assigned:
            self._workers.stop(signal.Signals[order.signal], order.grace_s)
        else:
            self._send(Stopped())

    # ---------------------------------------------------------------------------------- start

    def has_plan(self, plan_hash: str) -> bool:
        """Returns whether this node holds the plan in force, after reading it if it has changed.

        A shared folder may not show a new plan, or not let it be read, for a while.
        """
        if self._replans and plan_hash != self.plan.hash:
            self._read_plan()
        return plan_hash == self.plan.hash or not self._replans

    def start(self, assign: Assign) -> str | None:
        """Starts this node's workers; returns a reason if the assignment contradicts its plan."""
        if problem := self._contradiction(assign):
            return problem
        self._assigned = True
        assignments = sorted(assign.ranks, key=lambda assignment: assignment.gpu)
        ranks = [assignment.rank for assignment in assignments]
        on_gpus = self.plan.cluster.device == "cuda"
        visible: dict[str, str] = {}
        if on_gpus:
            visible = device_visibility(os.environ, [assignment.gpu for assignment in assignments])
        cores: list[Set[int]] = [frozenset()] * len(ranks)
        if self._worker.numa_binding and (on_gpus or not self._worker.bundled):
            cores = bound_cores(self._root, ranks, visible, self._worker.bundled, self._recorder)
        if 0 in ranks and self._store:
            self._store.admit(assign.peers)
        else:
            self._close_store()
        for local_rank, rank in enumerate(ranks):
            variables = self._environment(assign, rank, local_rank).variables() | visible
            self._start_worker(rank, variables, cores[local_rank], assign.final_checkpoint)
        event = "flush_started" if assign.final_checkpoint else "workers_started"
        self._recorder.event(event, ranks=ranks)
        return None

    def _contradiction(self, assign: Assign) -> str | None:
        """Returns the contradiction between an assignment and this node's plan, or None."""
        node_ranks = [rank for rank in self.plan.ranks if rank.node == self._node]
        planned = sorted((rank.rank, rank.gpu) for rank in node_ranks)
        assigned = sorted((assignment.rank, assignment.gpu) for assignment in assign.ranks)
        as_planned = assigned == planned and assign.world_size == len(self.plan.ranks)
        if assign.plan_hash == self.plan.hash and (as_planned or assign.final_checkpoint):
            return None
        return (
            f"the assignment has (rank, gpu) {assigned} of plan {assign.plan_hash[:12]}, this"
            f" node's plan has {planned}"
        )

    def _start_worker(
        self,
        rank: int,
        variables: dict[str, str],
        cores: Set[int],
        final_checkpoint: bool,
    ) -> None:
        argv = self._worker.argv
        if final_checkpoint:
            argv = [*argv, "--final-checkpoint"]
        log_path = self._folder.rank_log(rank)
        log_start = size_of(log_path)
        self._log_starts[rank] = log_start
        if self._printed_steps:
            self._printed_steps.follow(rank, log_path, log_start)
        banner = ""
        if log_start:
            started_at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            banner = f"--- orch: epoch {self._epoch} on {self._node}, {started_at} UTC\n"
        self._workers.start(
            rank,
            argv,
            environment=variables,
            cwd=self._worker.cwd,
            log=log_path,
            banner=banner,
            store=self._store.fileno() if self._store and self._gets_store(rank) else None,
            cores=cores,
        )

    def _read_plan(self) -> None:
        try:
            plan = load_plan(self._folder.plan)
        except PlanError as error:
            log.error("%s", error)
            return
        self.plan = plan
        self._recorder.replan(plan)

    def _environment(self, assign: Assign, rank: int, local_rank: int) -> WorkerEnv:
        return WorkerEnv(
            rank=rank,
            local_rank=local_rank,
            world_size=assign.world_size,
            local_world_size=len(assign.ranks),
            node_rank=assign.node_rank,
            master_addr=assign.master_address,
            master_port=assign.master_port,
            run_id=self._folder.run_id,
            epoch=self._epoch,
            node=self._node,
            plan=str(self._folder.plan),
            plan_hash=self.plan.hash,
            run_dir=str(self._folder.path),
            report_fd=REPORT_FD,
            store_fd=STORE_FD if self._gets_store(rank) else None,
            nodes=len(used_nodes(self.plan)),
            max_restarts=self._max_restarts,
        )

    # ---------------------------------------------------------------------------------- examine

    def examine(self, order: Examine) -> None:
        """Saves the stacks of all workers, then kills those in `order.end`."""
        identities = {rank: identity(pid) for rank, pid in self.pids.items() if pid}
        alive = {rank: worker for rank, worker in identities.items() if worker}
        task = asyncio.create_task(self._examine(order, self._epoch, alive))
        self._examinations.add(task)
        task.add_done_callback(self._examinations.discard)

    async def _examine(self, order: Examine, epoch: int, alive: dict[int, Identity]) -> None:
        log.error("%s", order.reason)
        dumps = [
            self._save_stack(epoch, rank, worker, order.reason) for rank, worker in alive.items()
        ]
        await asyncio.gather(*dumps)
        for rank in alive.keys() & order.end:
            last_line = f"orch: {order.reason}: killed\n"
            await self._disk.run(partial(append, self._folder.rank_log(rank), last_line), None)
            send_signal(alive[rank], signal.SIGKILL)

    async def _save_stack(self, epoch: int, rank: int, worker: Identity, reason: str) -> None:
        path = self._folder.stack(epoch, rank)
        if not await save_stack(worker, self._folder.rank_log(rank), path, reason, self._disk):
            self._recorder.event("stack_not_saved", rank=rank)

    # ---------------------------------------------------------------------------------- reports

    def _on_warm(self) -> None:
        self._recorder.event("workers_warm")
        self._send(Warm())

    def _on_exit(self, rank: int, code: int, after_stop: bool) -> None:
        report = partial(self._report_exit, self._epoch, rank, code, after_stop)
        self._report_queue.put_nowait(report)

    def _on_empty(self) -> None:
        self._report_queue.put_nowait(partial(self._report_stopped, self._epoch))

    async def _send_reports(self) -> None:
        """Sends reports in the order of their events.

        The first worker that fails is the cause, however long reading its log takes.
        """
        while True:
            send_report = await self._report_queue.get()
            await send_report()

    async def _report_exit(self, epoch: int, rank: int, code: int, after_stop: bool) -> None:
        """Records and reports the end of a worker. `after_stop`: it had been asked to stop."""
        if self._printed_steps:
            await self._printed_steps.on_worker_exit(rank)
        step = self._recorder.last_step.get(rank)
        self._recorder.event(
            "worker_ended",
            rank=rank,
            code=code,
            asked=after_stop,
            step=step,
        )
        log.info("rank %d ended: %s", rank, meaning(code))
        tail: list[str] = []
        if code:
            tail = await self._disk.run(lambda: self._explained_tail(rank), [])
        worker_exit = WorkerExit(
            rank=rank,
            code=code,
            asked=after_stop,
            step=step,
            tail=tail,
            **self._recorder.failure_of(rank),
        )
        if epoch == self._epoch:
            self._send(worker_exit)

    async def _report_stopped(self, epoch: int) -> None:
        if self._assigned and epoch == self._epoch:
            self._assigned = False
            self._send(Stopped())

    def _explained_tail(self, rank: int) -> list[str]:
        """Returns the end of a worker's log; adds orch's explanation of it there and to the log."""
        path = self._folder.rank_log(rank)
        tail = tail_of(path, self._log_starts.get(rank, 0))
        if explanation := explain(self._code, Path(self._worker.cwd), tail):
            tail.append(f"orch: {explanation}")
            append(path, f"orch: {explanation}\n")
        return tail


def bound_cores(
    root: Path,
    ranks: Sequence[int],
    visible: Mapping[str, str],
    one_gpu_each: bool,
    recorder: Recorder,
) -> list[Set[int]]:
    """Returns the cores of each rank, by local rank, empty for an unbound one; records the binding.

    `visible` are variables that these workers get in addition to the agent's own.
    """
    allowed = os.sched_getaffinity(0)
    binding = bind(
        root,
        os.environ | visible,
        allowed,
        len(ranks),
        one_gpu_each,
    )
    ranks_by_cores: dict[str, list[int]] = {}
    for rank, cores in zip(ranks, binding.cores, strict=True):
        if cores:
            ranks_by_cores.setdefault(format_cpu_list(cores), []).append(rank)
    if binding.reason:
        log.warning("workers are not bound to the cores of their GPU: %s", binding.reason)
    if binding.reason or ranks_by_cores:
        recorder.event("workers_bound", cores=ranks_by_cores, reason=binding.reason)
    return binding.cores


def with_own_python(worker: Worker) -> Worker:
    """Returns the worker with this agent's interpreter if it is a module of the bundled trainer.

    In a container the submitter's interpreter does not exist. `orch bench` runs such a module too.
    """
    if worker.argv[1:3] != ["-P", "-m"] or worker.argv[3].split(".")[0] != "trainer":
        return worker
    return structs.replace(worker, argv=[*start.command(worker.argv[3]), *worker.argv[4:]])


def preloaded(worker: Worker) -> list[str]:
    """Returns the command that starts the bundled trainer, or [] for a program of the user."""
    return worker.argv[: worker.argv.index("trainer") + 1] if worker.bundled else []
