"""The agent of one node: joins, starts its share of the workers when told, tells what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass

import msgspec

from orchestrator.agent.leader.election import LeaderElection
from orchestrator.agent.protocol.channel import Channel, Refused, WrongKey, connect, free_port
from orchestrator.agent.protocol.heartbeat import HeartbeatTimer, timeout_ticks
from orchestrator.agent.protocol.messages import (
    AgentAlive,
    Assign,
    CoordinatorAlive,
    Done,
    Examine,
    Fenced,
    FromCoordinator,
    Join,
    Prepare,
    Ready,
    Started,
    Stop,
    Stopped,
    TerminationSignal,
    Warm,
    WorkerExit,
)
from orchestrator.plan import Exit, Plan, PlanError, load_plan, meaning
from orchestrator.plan.worker import WorkerEnv
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, identity, send_signal
from orchestrator.run.request import LaunchRequest, Worker, used_nodes
from orchestrator.run.state import read_state

from .fork_server import REPORT_FD
from .progress import LOOK_S, is_frozen
from .recorder import Recorder
from .stacks import save_stack, tail_of
from .workers import Workers

_ORPHAN_GRACE_S = 10.0  # for workers whose coordinator is gone: they can no longer agree on a step to save
_FEW_NODES = 1024  # whose agents may speak at each look, which is twice a heartbeat
_ELASTIC_ORPHAN_GRACE_S = 3.0  # where another coordinator waits for this node

log = logging.getLogger("orch.agent")


@dataclass(frozen=True)
class NodeFacts:
    """Facts about this node that only its machine knows."""

    host: str
    address: str
    pid: int
    gpus: int
    nics: int


class Agent:
    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        request: LaunchRequest,
        node: str,
        place: NodeFacts,
        key: bytes,
        recorder: Recorder,
        metrics_address: str | None,
        election: LeaderElection | None = None,
    ):
        """`succession`: in elastic runs, whose coordinator moves."""
        self._election = election
        self._folder, self._plan, self._request = folder, plan, request
        self._node, self._place, self._key = node, place, key
        self._recorder, self._metrics_address = recorder, metrics_address
        program = preloaded(request.worker)
        known = {"ORCH_PLAN": str(folder.plan)}
        self._workers = Workers(self._worker_ended, self._all_ended, recorder.on_line, program, self._warmed, known)
        self._channel: Channel | None = None
        self._epoch = -1  # the last epoch it followed
        self._assigned = False  # workers of this epoch were started, and not all have ended
        self._log_starts: dict[int, int] = {}  # rank -> size of its log when this epoch began
        self._silent_ticks = 0
        self._result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._examining: set[asyncio.Task] = set()
        self._noticed = self._insisted = False  # told from outside that the end is wanted; by a signal

    async def run(self) -> int:
        """Be an agent until the run is over; the exit code. On return nothing that it started is alive."""
        tasks: list[asyncio.Task] = []
        try:
            self._workers.open()
            while True:
                self._channel = await (self._elect() if self._election else self._join())
                tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._tick())]
                done, _ = await asyncio.wait([self._result, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {self._result}:
                    task.result()  # a bug: let it be seen
                if self._result.done() or not self._election:
                    return await self._result
                await self._part(tasks)
        except _Ended:
            return self._result.result()
        except WrongKey as error:
            log.error("security: %s", error)
            self._recorder.event("refused", reason=str(error))
            return Exit.SECURITY
        finally:
            for task in (*tasks, *self._examining):
                task.cancel()
            self._workers.close()
            if self._channel:
                await self._channel.close()

    def notice(self, reason: str, signal_name: str = "SIGTERM", insists: bool = True) -> None:
        """Somebody outside wants the end: ask the coordinator to end the run. Whoever insists a second time is obeyed
        at once, without waiting for a save.
        """
        if self._noticed and not insists:
            return
        force = self._insisted and insists
        self._noticed, self._insisted = True, self._insisted or insists
        log.warning("%s", reason)
        self._recorder.event("notice", reason=reason, force=force)
        if self._channel is None:
            self._finish(Exit.RESTART, reason)
            return
        self._channel.send(
            self._epoch, TerminationSignal(reason=f"{self._node}: {reason}", signal=signal_name, force=force)
        )
        if force:
            self._workers.kill()

    # ---------------------------------------------------------------------------------- the coordinator

    async def _join(self) -> Channel:
        """Find the coordinator and say who we are. It may start after us, so try until the join timeout."""
        end = time.monotonic() + self._request.policy.join_timeout_s
        problem = "it has not said where it listens"
        while not self._result.done():
            try:
                where = msgspec.json.decode(self._folder.coordinator.read_bytes(), type=dict[str, str | int])
                arguments = self._folder.run_id, self._node, self._key, FromCoordinator
                channel = await connect(str(where["host"]), int(where["port"]), *arguments)
            except FileNotFoundError:
                pass
            except (OSError, Refused, msgspec.MsgspecError, KeyError) as error:
                if isinstance(error, WrongKey):
                    raise
                problem = str(error)
            else:
                self._introduce(channel)
                return channel
            if time.monotonic() > end:
                self._finish(Exit.CAPACITY, f"no coordinator: {problem}")
                break
            await asyncio.sleep(0.05)
        raise _Ended

    def _introduce(self, channel: Channel) -> None:
        join = Join(
            node=self._node,
            host=self._place.host,
            address=self._place.address,
            pid=self._place.pid,
            gpus=self._place.gpus,
            nics=self._place.nics,
            plan_hash=self._plan.hash,
            metrics=self._metrics_address,
            warm=self._workers.warm,
        )
        channel.send(self._epoch, join)

    async def _elect(self) -> Channel:
        """In an elastic run: to the coordinator, wherever it is by now, and be it in this very process."""
        channel = await self._election.join(self._epoch, used_nodes(self._plan), self._result)
        if channel is None:
            over = read_state(self._folder)
            if over.is_final:  # this agent was frozen or cut off, or came too late
                self._finish(Exit.FENCED, f"the run has ended meanwhile: {over.state}")
            self._finish(Exit.CAPACITY, "no coordinator, and none could be made")
            raise _Ended
        self._introduce(channel)
        return channel

    async def _part(self, tasks: list[asyncio.Task]) -> None:
        """From a coordinator that is gone; no worker runs any more."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channel, self._channel = self._channel, None
        self._silent_ticks, self._assigned = 0, False
        await channel.close()

    async def _listen(self) -> None:
        """Obey the coordinator until it goes away."""
        reason = "the coordinator is gone"
        try:
            while (received := await self._channel.receive()) is not None:
                self._silent_ticks = 0
                self._obey(*received)
        except Refused as error:
            reason = f"the coordinator sent {error}"
        await self._orphaned(reason)

    async def _tick(self) -> None:
        """Heartbeats. As on the other side ticks are counted, so that a pause of our own is not blamed on the peer."""
        most = timeout_ticks(self._request.policy.heartbeat_timeout_s, LOOK_S)
        clock = asyncio.get_running_loop().time
        beat, few = HeartbeatTimer(LOOK_S, clock()), len(self._request.agents) <= _FEW_NODES
        while True:
            began = clock()
            await asyncio.sleep(LOOK_S)
            due, in_time = beat.tick(began, clock())
            seen = self._recorder.watch.look(self._workers.pids)
            if due or few or any(map(is_frozen, seen)):
                self._channel.send(self._epoch, AgentAlive(step=self._recorder.furthest_step, seen=seen))
            self._recorder.metrics.set("orch_workers", len(self._workers.pids))
            self._silent_ticks += in_time
            if in_time and self._silent_ticks == most:
                self._channel.abort()  # _listen goes on from there

    async def _examine(self, order: Examine, epoch: int, alive: dict[int, Identity]) -> None:
        """Save where all workers are, then end those that hold the others up."""
        log.error("%s", order.reason)
        await asyncio.gather(*(self._save_stack(epoch, rank, worker, order.reason) for rank, worker in alive.items()))
        for rank in alive.keys() & order.end:
            with contextlib.suppress(OSError), self._folder.rank_log(rank).open("a") as file:
                file.write(f"orch: {order.reason}: killed\n")
            send_signal(alive[rank], signal.SIGKILL)

    async def _save_stack(self, epoch: int, rank: int, worker: Identity, reason: str) -> None:
        path = self._folder.stack(epoch, rank)
        if not await save_stack(worker, self._folder.rank_log(rank), path, reason):
            self._recorder.event("stack_not_saved", rank=rank)

    async def _orphaned(self, reason: str) -> None:
        """Without a coordinator nobody may write any more: end the workers, then leave."""
        if self._result.done():
            return
        log.error("%s", reason)
        self._recorder.event("coordinator_lost", reason=reason)
        grace = _ELASTIC_ORPHAN_GRACE_S if self._election else _ORPHAN_GRACE_S
        self._workers.stop(signal.SIGTERM, min(grace, self._request.policy.grace_s))
        while self._workers.pids and not self._result.done():
            await asyncio.sleep(0.05)
        if not self._election:
            self._finish(Exit.CAPACITY, reason)

    def dismiss(self, code: int, reason: str) -> None:
        """The coordinator in this process has found that it is none any more, or that this node must leave."""
        if code == Exit.FENCED:
            self._workers.kill()
        self._finish(code, reason)

    def _obey(self, epoch: int, message: object) -> None:
        if isinstance(message, Fenced):
            self._workers.kill()
            self._finish(Exit.FENCED, message.reason)
        elif epoch < self._epoch:
            log.warning("ignored %s of epoch %d, this is %d", type(message).__name__, epoch, self._epoch)
            self._recorder.event("stale_message", message=type(message).__name__, of_epoch=epoch)
        elif isinstance(message, Done):
            self._finish(message.code, message.reason)
        elif isinstance(message, Prepare):
            if epoch > self._epoch:
                self._follow(epoch)
        elif epoch != self._epoch:
            return  # of an epoch that we were not prepared for: a coordinator's heartbeat on the way
        elif isinstance(message, Assign):
            self._start(message)
        elif isinstance(message, CoordinatorAlive):
            self._recorder.metrics.set("orch_node_slowdown_ratio", message.slowdown)
        elif isinstance(message, Examine):
            alive = {rank: worker for rank, pid in self._workers.pids.items() if pid and (worker := identity(pid))}
            task = asyncio.create_task(self._examine(message, epoch, alive))
            self._examining.add(task)
            task.add_done_callback(self._examining.discard)
        elif isinstance(message, Stop) and self._examining:
            # Another node was faster in ending its workers: no reason to end ours before they have spoken.
            next(iter(self._examining)).add_done_callback(lambda task: task.cancelled() or self._obey(epoch, message))
        elif isinstance(message, Stop):
            log.warning("stopping: %s", message.reason)
            if self._assigned:
                self._workers.stop(signal.Signals[message.signal], message.grace_s)
            else:
                self._channel.send(self._epoch, Stopped())

    def _follow(self, epoch: int) -> None:
        """A new epoch. The coordinator sends it when all workers of the last one are gone; make sure."""
        self._workers.kill()
        self._epoch, self._assigned = epoch, False
        self._recorder.begin_epoch(epoch)
        self._channel.send(epoch, Ready(port=free_port(self._place.address)))

    def _finish(self, code: int, reason: str) -> None:
        if not self._result.done():
            log.info("leaving with %d (%s): %s", code, meaning(code), reason)
            self._recorder.event("leaving", code=int(code), reason=reason)
            self._result.set_result(int(code))

    # ---------------------------------------------------------------------------------- the workers

    def _start(self, assign: Assign) -> None:
        """Start this node's slice of the rank map, if it is what our own copy of the plan says."""
        if self._election and assign.plan_hash != self._plan.hash:
            self._read_plan()
        ours = sorted((rank.rank, rank.gpu) for rank in self._plan.ranks if rank.node == self._node)
        told = sorted((seat.rank, seat.gpu) for seat in assign.seats)
        as_planned = assign.flush or (told == ours and assign.world_size == len(self._plan.ranks))
        if assign.plan_hash != self._plan.hash or not as_planned:
            self._finish(
                Exit.CONFIG, f"told to start ranks {told} of plan {assign.plan_hash[:12]}, the plan has {ours}"
            )
            return
        self._assigned = True
        by_gpu = sorted(assign.seats, key=lambda seat: seat.gpu)
        holes = [seat.gpu for seat in by_gpu] != list(range(len(by_gpu)))
        for local_rank, seat in enumerate(by_gpu):
            variables = self._worker_environment(assign, seat.rank, local_rank).variables()
            if holes and self._plan.cluster.device == "cuda":
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(seat.gpu) for seat in by_gpu)
            path = self._folder.rank_log(seat.rank)
            self._log_starts[seat.rank] = path.stat().st_size if path.exists() else 0
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
            banner = (
                f"--- orch: epoch {self._epoch} on {self._node}, {when} UTC\n" if self._log_starts[seat.rank] else ""
            )
            worker = self._request.worker
            argv = [*worker.argv, "--final-checkpoint"] if assign.flush else worker.argv
            self._workers.start(seat.rank, argv, variables, worker.cwd, path, banner)
        what = "flush_started" if assign.flush else "workers_started"
        self._recorder.event(what, ranks=[seat.rank for seat in by_gpu])
        if self._election:
            self._election.prepare(used_nodes(self._plan))
        self._channel.send(self._epoch, Started())

    def _read_plan(self) -> None:
        """The plan in force is another one now. What is wrong with it shows in the comparison that follows."""
        try:
            self._plan = load_plan(self._folder.plan)
            self._recorder.replan(self._plan)
        except PlanError as error:
            log.error("%s", error)

    def _worker_environment(self, assign: Assign, rank: int, local_rank: int) -> WorkerEnv:
        return WorkerEnv(
            rank=rank,
            local_rank=local_rank,
            world_size=assign.world_size,
            local_world_size=len(assign.seats),
            node_rank=assign.node_rank,
            master_addr=assign.master_address,
            master_port=assign.master_port,
            run_id=self._folder.run_id,
            epoch=self._epoch,
            node=self._node,
            plan=str(self._folder.plan),
            plan_hash=self._plan.hash,
            run_dir=str(self._folder.path),
            report_fd=REPORT_FD,
        )

    def _warmed(self) -> None:
        self._recorder.event("workers_warm")
        if self._channel:
            self._channel.send(self._epoch, Warm())

    def _worker_ended(self, rank: int, code: int, asked: bool) -> None:
        step = self._recorder.last_step.get(rank)
        self._recorder.event("worker_ended", rank=rank, code=code, asked=asked, step=step)
        log.info("rank %d ended: %s", rank, meaning(code))
        tail = tail_of(self._folder.rank_log(rank), self._log_starts.get(rank, 0)) if code else []
        said = self._recorder.failure_of(rank)
        if self._channel:
            self._channel.send(self._epoch, WorkerExit(rank=rank, code=code, asked=asked, step=step, tail=tail, **said))

    def _all_ended(self) -> None:
        if self._assigned and self._channel:
            self._assigned = False
            self._channel.send(self._epoch, Stopped())


class _Ended(Exception):
    """The agent is over before it joined."""


def preloaded(worker: Worker) -> list[str]:
    """The words that start the bundled trainer, `python … -m trainer`; nothing for a program of the user's."""
    return worker.argv[: worker.argv.index("-m") + 2] if worker.bundled else []
