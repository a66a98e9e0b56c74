"""Starts, examines and stops the workers of a node as the coordinator says, and reports how they
end."""

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
from orchestrator.run.folder import RunFolder
from orchestrator.run.left_out import explain
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
    """`send`: a message of the current epoch to the coordinator. `replans`: the plan in force may
    change. `root`: where the files of this machine's cores and GPUs are."""

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
        program = preloaded(self._worker)
        environment = {"ORCH_PLAN": str(folder.plan)}
        told = self._on_exit, self._on_empty, recorder.on_line, program, self._on_warm, environment
        self._workers = Workers(*told, lambda: self._send(Started()))
        pattern = self._worker.pattern
        self._disk = Disk()
        self._printed_steps = (
            PrintedSteps(pattern, recorder.on_printed_step, self._disk) if pattern else None
        )
        self._report_queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._report_task: asyncio.Task[None] | None = None
        self._epoch = -1
        self._assigned = False  # workers of this epoch were started, and not all have ended
        self._log_starts: dict[int, int] = {}  # rank -> size of its log when this epoch began
        self._examinations: set[asyncio.Task] = set()
        self._store: StoreSocket | None = None  # of this epoch

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> pid of the workers that are alive."""
        return self._workers.pids

    @property
    def warm(self) -> bool:
        return self._workers.warm

    def watch(self) -> None:
        """To be called every half second: sees to it that the end of a worker is heard of."""
        if self._printed_steps:
            self._printed_steps.watch()
        if self._report_task and self._report_task.done():
            self._report_task.result()  # a bug: let it be seen
        if outcome := self._workers.watch():
            log.error("%s", outcome)
            self._recorder.event("worker_supervisor_stopped", reason=outcome)

    @property
    def examination(self) -> asyncio.Task | None:
        """One that is under way."""
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
        """The coordinator starts an epoch when all workers of the last one are gone; makes sure of
        it."""
        self._workers.kill()
        self._epoch = epoch
        self._assigned = False
        self._recorder.begin_epoch(epoch)
        if self._printed_steps:
            self._printed_steps.begin_epoch(epoch)

    def open_store(self, address: str) -> int:
        """Opens the socket of the store that this epoch's rank 0 will have if it runs here; returns
        its port."""
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
        """The coordinator is gone, and with it the assignment of ranks."""
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
        """Whether this node has the plan that is in force, which is read here where it has changed.
        A shared folder may not show it, or not let it be read, for a while."""
        if self._replans and plan_hash != self.plan.hash:
            self._read_plan()
        return plan_hash == self.plan.hash or not self._replans

    def start(self, assign: Assign) -> str | None:
        """Starts this node's workers, if the assignment is what this node's copy of the plan says;
        else why not."""
        planned = sorted(
            (rank.rank, rank.gpu) for rank in self.plan.ranks if rank.node == self._node
        )
        assigned = sorted((assignment.rank, assignment.gpu) for assignment in assign.ranks)
        as_planned = assign.final_checkpoint or (
            assigned == planned and assign.world_size == len(self.plan.ranks)
        )
        if assign.plan_hash != self.plan.hash or not as_planned:
            return f"told to start ranks {assigned} of plan {assign.plan_hash[:12]}, the plan has {planned}"
        self._assigned = True
        by_gpu = sorted(assign.ranks, key=lambda assignment: assignment.gpu)
        on_gpus = self.plan.cluster.device == "cuda"
        visible = (
            device_visibility(os.environ, [assignment.gpu for assignment in by_gpu])
            if on_gpus
            else {}
        )
        ranks = [assignment.rank for assignment in by_gpu]
        cores: list[Set[int]] = [frozenset()] * len(ranks)
        if self._worker.numa_binding and (on_gpus or not self._worker.bundled):
            cores = bound_cores(self._root, ranks, visible, self._worker.bundled, self._recorder)
        if any(assignment.rank == 0 for assignment in assign.ranks) and self._store:
            self._store.admit(assign.peers)
        else:
            self._close_store()
        argv = (
            [*self._worker.argv, "--final-checkpoint"]
            if assign.final_checkpoint
            else self._worker.argv
        )
        for local_rank, assignment in enumerate(by_gpu):
            variables = self._environment(assign, assignment.rank, local_rank).variables() | visible
            log_path = self._folder.rank_log(assignment.rank)
            start = self._log_starts[assignment.rank] = size_of(log_path)
            if self._printed_steps:
                self._printed_steps.follow(assignment.rank, log_path, start)
            started_at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            banner = (
                f"--- orch: epoch {self._epoch} on {self._node}, {started_at} UTC\n"
                if start
                else ""
            )
            store = (
                self._store.fileno() if self._gets_store(assignment.rank) and self._store else None
            )
            self._workers.start(
                assignment.rank,
                argv,
                variables,
                self._worker.cwd,
                log_path,
                banner,
                store,
                cores[local_rank],
            )
        self._recorder.event(
            "flush_started" if assign.final_checkpoint else "workers_started", ranks=ranks
        )
        return None

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
        alive = {
            rank: worker for rank, pid in self.pids.items() if pid and (worker := identity(pid))
        }
        task = asyncio.create_task(self._examine(order, self._epoch, alive))
        self._examinations.add(task)
        task.add_done_callback(self._examinations.discard)

    async def _examine(self, order: Examine, epoch: int, alive: dict[int, Identity]) -> None:
        log.error("%s", order.reason)
        await asyncio.gather(
            *(self._save_stack(epoch, rank, worker, order.reason) for rank, worker in alive.items())
        )
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

    def _on_exit(self, rank: int, code: int, asked: bool) -> None:
        self._report_queue.put_nowait(partial(self._report_exit, self._epoch, rank, code, asked))

    def _on_empty(self) -> None:
        self._report_queue.put_nowait(partial(self._report_stopped, self._epoch))

    async def _send_reports(self) -> None:
        """In the order in which they came: the first worker that has failed is the cause, whatever
        its log takes."""
        while True:
            send_report = await self._report_queue.get()
            await send_report()

    async def _report_exit(self, epoch: int, rank: int, code: int, asked: bool) -> None:
        if self._printed_steps:
            await self._printed_steps.on_worker_exit(rank)
        step = self._recorder.last_step.get(rank)
        self._recorder.event("worker_ended", rank=rank, code=code, asked=asked, step=step)
        log.info("rank %d ended: %s", rank, meaning(code))
        tail: list[str] = (
            await self._disk.run(lambda: self._explained_tail(rank), []) if code else []
        )
        failure = self._recorder.failure_of(rank)
        if epoch == self._epoch:
            self._send(
                WorkerExit(rank=rank, code=code, asked=asked, step=step, tail=tail, **failure)
            )

    async def _report_stopped(self, epoch: int) -> None:
        if self._assigned and epoch == self._epoch:
            self._assigned = False
            self._send(Stopped())

    def _explained_tail(self, rank: int) -> list[str]:
        """The end of a worker's log, with what orch knows of it, which is also written there."""
        path = self._folder.rank_log(rank)
        tail = tail_of(path, self._log_starts.get(rank, 0))
        if explanation := explain(self._code, self._folder.code, Path(self._worker.cwd), tail):
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
    """The cores of each of these ranks, by local rank, none of one that stays free; what was done
    is recorded.

    `visible`: variables that these workers get beside the agent's own.
    """
    allowed = os.sched_getaffinity(0)
    binding = bind(root, os.environ | visible, allowed, len(ranks), one_gpu_each)
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
    """The bundled trainer, or another module of it (`orch bench`), as this agent has it: in a
    container the submitter's interpreter does not exist."""
    if worker.argv[1:3] != ["-P", "-m"] or worker.argv[3].split(".")[0] != "trainer":
        return worker
    return structs.replace(worker, argv=[*start.command(worker.argv[3]), *worker.argv[4:]])


def preloaded(worker: Worker) -> list[str]:
    """The words that start the bundled trainer; nothing for a program of the user's."""
    return worker.argv[: worker.argv.index("trainer") + 1] if worker.bundled else []
