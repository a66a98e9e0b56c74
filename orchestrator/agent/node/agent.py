"""The agent of one node: joins the coordinator, controls its workers on its behalf, and reports."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import assert_never

from orchestrator.agent.protocol import messages
from orchestrator.agent.protocol.channel import Channel, Refused, WrongKey
from orchestrator.agent.protocol.heartbeat import HeartbeatTimer, timeout_ticks
from orchestrator.plan import Exit, Plan, meaning
from orchestrator.run.folder import RECORD_S, RunFolder
from orchestrator.run.intent import unwritten_end
from orchestrator.run.request import LaunchRequest, used_nodes

from .connection import Connector, NoCoordinator
from .progress import LOOK_S
from .recorder import Recorder
from .worker_control import WorkerControl

#: Seconds for workers whose coordinator is gone: they can no longer agree on a step to save.
_ORPHAN_GRACE_S = 10.0
_ELASTIC_ORPHAN_GRACE_S = 3.0  # another coordinator waits for this node
#: Up to so many nodes, agents report at each examination of their workers, twice per heartbeat.
_FEW_NODES = 1024

log = logging.getLogger("orch.agent")


@dataclass(frozen=True)
class NodeFacts:
    """Facts that only the node's machine knows."""

    host: str
    address: str
    pid: int
    gpus: int
    nics: int
    addresses: tuple[str, ...] = ()  # all of its interfaces


class Agent:
    """The agent of one node.

    `metrics_address` is host:port of this node's Prometheus endpoint, `root` the root of the
    machine's own files.
    """

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        request: LaunchRequest,
        node: str,
        facts: NodeFacts,
        recorder: Recorder,
        metrics_address: str | None,
        connector: Connector,
        root: Path = Path("/"),
    ):
        self._rules = request.policy
        self._few_nodes = len(request.agents) <= _FEW_NODES
        self._node = node
        self._facts = facts
        self._connector = connector
        self._recorder = recorder
        self._metrics_address = metrics_address
        self._control = WorkerControl(
            folder,
            plan,
            request,
            node=node,
            recorder=recorder,
            send=self._send,
            replans=connector.moves,
            root=root,
        )
        self._channel: Channel | None = None
        self._epoch = -1  # the last epoch it followed
        self._silent_ticks = 0
        #: The assignment of this epoch, until its workers have to stop.
        self._assigned: messages.Assign | None = None
        self._result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._signalled = False  # a termination signal was received
        self._next_forces = False  # a further signal kills the workers without a save
        #: The last termination signal; it is sent to the next coordinator as well.
        self._termination: messages.TerminationSignal | None = None

    async def run(self) -> int:
        """Runs until the run is over; returns the exit code once all processes below are gone."""
        tasks: list[asyncio.Task] = []
        try:
            self._control.open()
            while True:
                channel = await self._join()
                tasks = [
                    asyncio.create_task(self._listen(channel)),
                    asyncio.create_task(self._heartbeats(channel)),
                ]
                done, _ = await asyncio.wait(
                    [self._result, *tasks], return_when=asyncio.FIRST_COMPLETED
                )
                for task in done - {self._result}:
                    task.result()  # raises the error of a bug
                if self._result.done() or not self._connector.moves:
                    return await self._result
                await self._disconnect(tasks)
        except NoCoordinator as error:
            self._finish(error.code, error.reason)
            return self._result.result()
        except WrongKey as error:
            log.error("security: %s", error)
            self._recorder.event("refused", reason=str(error))
            return Exit.SECURITY
        finally:
            for task in tasks:
                task.cancel()
            self._control.close()
            if self._channel:
                await self._channel.close()

    # ---------------------------------------------------------------------------------- the end

    def terminate(self, reason: str, signal_name: str = "SIGTERM", can_force: bool = True) -> None:
        """Asks the coordinator to end the run, or to continue without this node.

        The second signal that `can_force` kills the workers at once, without a save.
        """
        if self._signalled and not can_force:
            return
        force = self._next_forces and can_force
        self._next_forces = self._next_forces or can_force
        node_reason = f"{self._node}: {reason}"
        termination = messages.TerminationSignal(
            reason=node_reason,
            signal=signal_name,
            force=force,
        )
        self._forward_termination(reason, termination)

    def request_end(self, force: bool) -> None:
        """Forwards a request of people to end the run to the coordinator."""
        reason = unwritten_end(force).text
        termination = messages.TerminationSignal(
            reason=reason,
            signal="SIGTERM",
            force=force,
            by_people=True,
        )
        self._forward_termination(reason, termination)

    def _forward_termination(self, reason: str, termination: messages.TerminationSignal) -> None:
        """Sends a termination signal to the coordinator. `reason` is for this node's log."""
        self._signalled = True
        self._termination = termination
        log.warning("%s", reason)
        self._recorder.event("notice", reason=reason, force=termination.force)
        if self._channel is None:
            self._finish(Exit.RESTART, reason)
            return
        self._send(termination)
        if termination.force:
            self._control.kill()

    def exit_with(self, code: int, reason: str) -> None:
        """Ends this agent: its coordinator is fenced, or this node must leave the run."""
        if code == Exit.FENCED:
            self._control.kill()
        self._finish(code, reason)

    def _finish(self, code: int, reason: str) -> None:
        if not self._result.done():
            log.info("leaving with %d (%s): %s", code, meaning(code), reason)
            self._recorder.event("leaving", code=int(code), reason=reason)
            self._result.set_result(int(code))

    # ------------------------------------------------------------------------- the connection

    def _send(self, message: messages.FromAgent) -> None:
        if self._channel:
            self._channel.send(self._epoch, message)

    async def _join(self) -> Channel:
        channel = await self._connector.connect(
            self._epoch, used_nodes(self._control.plan), self._result
        )
        self._channel = channel
        self._send(
            messages.Join(
                node=self._node,
                **asdict(self._facts),
                plan_hash=self._control.plan.hash,
                metrics=self._metrics_address,
                warm=self._control.warm,
            )
        )
        if self._termination:
            self._send(self._termination)
        return channel

    async def _disconnect(self, tasks: list[asyncio.Task]) -> None:
        """Leaves a coordinator that is gone, after the last worker has ended."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channel = self._channel
        self._channel = None
        self._silent_ticks = 0
        self._assigned = None
        self._control.on_disconnect()
        if channel:
            await channel.close()

    async def _heartbeats(self, channel: Channel) -> None:
        """Sends heartbeats, and closes the connection if the coordinator is silent.

        See protocol/heartbeat.py.
        """
        timeout = timeout_ticks(self._rules.heartbeat_timeout_s, LOOK_S)
        clock = asyncio.get_running_loop().time
        timer = HeartbeatTimer(LOOK_S, clock())
        while True:
            began = clock()
            await asyncio.sleep(LOOK_S)
            due, in_time = timer.tick(began, clock())
            self._control.watch()
            pids = self._control.pids
            workers = self._recorder.progress.look(pids)
            if due or self._few_nodes or any(worker.is_frozen for worker in workers):
                self._send(messages.AgentAlive(step=self._recorder.furthest_step, seen=workers))
            self._recorder.metrics.set("orch_workers", len(pids))
            self._silent_ticks += in_time
            if in_time and self._silent_ticks == timeout:
                channel.abort()  # ends `_listen`, which handles the loss

    async def _listen(self, channel: Channel) -> None:
        """Handles the coordinator's messages until it is gone."""
        reason = "the coordinator is gone"
        try:
            while (received := await channel.receive()) is not None:
                self._silent_ticks = 0
                self._handle(*received)
        except Refused as error:
            reason = f"the coordinator sent {error}"
        if not self._result.done():
            await self._on_coordinator_lost(reason)

    async def _on_coordinator_lost(self, reason: str) -> None:
        """Stops the workers, since nobody may write to the run without a coordinator."""
        log.error("%s", reason)
        self._recorder.event("coordinator_lost", reason=reason)
        grace_s = _ELASTIC_ORPHAN_GRACE_S if self._connector.moves else _ORPHAN_GRACE_S
        self._control.terminate(min(grace_s, self._rules.grace_s))
        while self._control.pids and not self._result.done():
            await asyncio.sleep(0.05)
        if not self._connector.moves:
            self._finish(Exit.CAPACITY, reason)

    # ------------------------------------------------------------- the coordinator's messages

    def _handle(self, epoch: int, message: messages.FromCoordinator) -> None:
        if isinstance(message, messages.Fenced):
            self._control.kill()
            self._finish(Exit.FENCED, message.reason)
        elif epoch < self._epoch:
            log.warning(
                "ignored %s of epoch %d, this is %d", type(message).__name__, epoch, self._epoch
            )
            self._recorder.event("stale_message", message=type(message).__name__, of_epoch=epoch)
        elif isinstance(message, messages.Done):
            self._finish(message.code, message.reason)
        elif isinstance(message, messages.Prepare):
            if epoch > self._epoch:
                self._epoch = epoch
                self._assigned = None
                self._control.begin_epoch(epoch)
                self._send_ready(epoch)
        elif epoch == self._epoch:  # else a heartbeat of an epoch for which there was no Prepare
            self._handle_current(message)

    def _handle_current(
        self,
        message: messages.Assign | messages.Stop | messages.Examine | messages.CoordinatorAlive,
    ) -> None:
        match message:
            case messages.Assign():
                self._assigned = message
                self._assign(message, asyncio.get_running_loop().time() + RECORD_S)
            case messages.CoordinatorAlive():
                self._recorder.metrics.set("orch_node_slowdown_ratio", message.slowdown)
            case messages.Examine():
                self._control.examine(message)
            case messages.Stop():
                self._assigned = None
                self._stop(message)
            case _:
                assert_never(message)

    def _send_ready(self, epoch: int) -> None:
        """Reports the port of a store for rank 0; retries while no socket can be opened."""
        if epoch != self._epoch or self._result.done():
            return
        try:
            port = self._control.open_store(self._facts.address)
        except OSError as error:
            log.error("cannot open a socket for the store; will retry: %s", error)
            asyncio.get_running_loop().call_later(LOOK_S, self._send_ready, epoch)
        else:
            self._send(messages.Ready(port=port))

    def _assign(self, order: messages.Assign, until: float) -> None:
        """Starts the workers; retries until loop time `until` while their plan is unreadable."""
        if self._assigned is not order or self._result.done():
            return
        loop = asyncio.get_running_loop()
        if not self._control.has_plan(order.plan_hash) and loop.time() < until:
            loop.call_later(LOOK_S, self._assign, order, until)
        elif problem := self._control.start(order):
            self._finish(Exit.CONFIG, problem)
        else:
            self._connector.workers_started(used_nodes(self._control.plan))

    def _stop(self, order: messages.Stop) -> None:
        examination = self._control.examination
        epoch = self._epoch
        if examination is None:
            self._control.stop(order)
        else:
            # Another node ended its workers first: this node's workers end once their stacks are
            # saved.
            examination.add_done_callback(
                lambda task: None if task.cancelled() else self._handle(epoch, order)
            )
