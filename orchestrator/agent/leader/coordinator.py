"""The coordinator: decides about epochs and is the only writer of the run's state.

It has a connection to every agent, including the one in its own process. In a run with fixed nodes
it runs on the plan's first node; in an elastic run it moves to another node when its own is lost
(`election`). It waits for the nodes, runs epochs until the policy ends the run, saves checkpoints
that exist only in memory, and sends the agents away. All events pass through one queue, so they
have one order and need no lock. The work is divided: `Membership` (who is connected), `Elasticity`
(the next nodes and plan), `Epoch` (one attempt of the workers), `StateWriter`, `FinalCheckpoint`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

from orchestrator.agent.faults import policy
from orchestrator.agent.faults.attribution import FaultHistory
from orchestrator.agent.faults.detector import HangDetector
from orchestrator.agent.protocol.admission import BACKLOG
from orchestrator.agent.protocol.channel import READ_LIMIT
from orchestrator.agent.protocol.heartbeat import SelfStallDetector
from orchestrator.agent.protocol.messages import Done, Join, TerminationSignal
from orchestrator.plan import Exit
from orchestrator.run.bad_nodes import remember
from orchestrator.run.epoch_lease import LeaseLost
from orchestrator.run.folder import NO_ROOM, RECORD_ERRORS

from .context import Context, log
from .elasticity import CoordinatorLeaves, Elasticity
from .election import Announcement
from .epoch import Epoch
from .final_checkpoint import FinalCheckpoint, is_due
from .membership import MemberLost
from .world_sizes import WorldSizes


class Coordinator:
    """Coordinates one run. See the module."""

    def __init__(self, context: Context, sizes: WorldSizes):
        self._context = context
        self._announcement = Announcement(context.folder, context.state_writer, context.node)
        self._elasticity = Elasticity(context, sizes, self._announcement)
        self._detector = HangDetector(context.rules)
        self._stalls = SelfStallDetector()
        self._last_intent = 0  # number of the newest request of people that was handled
        self._heartbeat_failed = False  # the last heartbeat could not be written

    async def run(self, host: str, port: int = 0) -> policy.Decision:
        """Coordinates until the run is over; returns the decision that ended it.

        The decision's code is Exit.FENCED if another coordinator took a newer epoch; nothing is
        written after that.
        """
        try:
            return await self._lead(host, port)
        except LeaseLost as error:
            self._context.record_event("deposed", reason=str(error))
            code = Exit.RESTART if isinstance(error, CoordinatorLeaves) else Exit.FENCED
            return self._context.end_run("failed", code, str(error))

    async def _lead(self, host: str, port: int) -> policy.Decision:
        context = self._context
        server = await asyncio.start_server(
            context.membership.serve_connection,
            host,
            port,
            limit=READ_LIMIT,
            backlog=BACKLOG,
        )
        ticker = asyncio.create_task(context.membership.run_heartbeats(self._on_heartbeat))
        ticker.add_done_callback(context.on_ticker_end)
        try:
            bound_host, bound_port, *_ = server.sockets[0].getsockname()
            await context.retry_on_disk_errors(
                lambda: self._announcement.begin(bound_host, bound_port)
            )
            context.state_writer.update(
                state="starting", reason=f"waiting for {len(context.ranked_nodes)} nodes"
            )
            decision = await self._elasticity.wait_for_nodes()
            while decision is None or decision.again:
                decision = await self._run_epoch()
            decision = await self._save_final_checkpoint(decision)
            await self._finish(decision)
            return decision
        except RECORD_ERRORS as error:
            is_full = isinstance(error, OSError) and error.errno in NO_ROOM
            decision = context.end_run(
                "stopped",
                Exit.RESTART,
                f"the run's state cannot be written: {error}",
                kind="disk_full" if is_full else "disk_failed",
            )
            await self._finish(decision)
            return decision
        finally:
            ticker.cancel()
            server.close()
            context.membership.close()

    async def _run_epoch(self) -> policy.Decision:
        """Runs one epoch; returns the decision, after putting the next epoch's plan in force."""
        context = self._context
        metrics = self._context.recorder.metrics
        ended = await Epoch(context, self._detector, self._elasticity).run()
        history = FaultHistory(
            tuple(context.state_writer.causes),
            len(context.ranked_nodes),
            context.rules.bad_node_after,
        )
        decision = policy.decide(ended, context.budget, history)
        await self._exclude_bad_node(decision)
        decision = await self._elasticity.next_plan(decision)
        context.budget = decision.budget
        context.state_writer.end_epoch(decision)
        if decision.cause:
            metrics.add("orch_faults", 1, decision.cause.kind, "agent")
        if decision.again:
            metrics.add("orch_restarts", 1, "failure" if decision.counted else "saved")
        context.record_epoch_end(decision)
        return decision

    async def _save_final_checkpoint(self, decision: policy.Decision) -> policy.Decision:
        """Saves state that only the nodes' memories hold; returns the decision with the outcome."""
        context = self._context
        if not await context.retry_on_disk_errors(
            lambda: is_due(context.folder, context.plan, decision)
        ):
            return decision
        outcome = await FinalCheckpoint(context).run()
        return replace(
            decision,
            reason="; ".join(filter(None, (decision.reason, outcome))),
        )

    async def _exclude_bad_node(self, decision: policy.Decision) -> None:
        """Excludes a bad node from this attempt and from the user's next runs.

        The exclusion survives a change of the coordinator.
        """
        context = self._context
        node = decision.exclude
        if node is None and decision.code == Exit.NODE and decision.cause:
            node = decision.cause.node
        if node is None:
            return
        reason = decision.reason
        context.record_event("node_excluded", on=node, reason=reason)
        context.membership.excluded[node] = reason
        context.state_writer.exclude(node, reason)
        hours = context.rules.remember_bad_nodes_h
        # In a thread: it may wait for other runs, while heartbeats continue.
        await asyncio.to_thread(lambda: remember(context.folder, node, reason, hours, time.time()))

    async def _finish(self, decision: policy.Decision) -> None:
        context = self._context
        context.state_writer.finish(decision)
        context.record_event(
            "run_ended",
            state=decision.state,
            code=decision.code,
            reason=decision.reason,
        )
        done = Done(code=decision.code, reason=decision.reason)
        for member in context.members.values():
            member.channel.send(context.epoch, done)
        deadline = asyncio.get_running_loop().time() + context.rules.grace_s
        # An agent closes its connection once its workers are gone.
        while context.members and (event := await context.next_event(deadline)):
            if isinstance(event.message, MemberLost):
                context.membership.remove(event.node, "node_left", event.message.reason)
            elif isinstance(event.message, Join) and (rejoined := context.members.get(event.node)):
                rejoined.channel.send(context.epoch, done)
        with contextlib.suppress(*RECORD_ERRORS):  # the final state may not be on disk yet
            await context.retry_on_disk_errors(context.state_writer.retry)

    def _on_heartbeat(self) -> None:
        """Runs once per heartbeat: handles new requests of people, renews the lease, retries the
        disk.

        A request may have been delivered to a former coordinator that is gone, so it is read from
        disk.
        """
        context = self._context
        if (intent := context.end_intent) and intent.number > self._last_intent:
            self._last_intent = intent.number
            context.put_event(
                context.node,
                TerminationSignal(
                    reason=intent.text,
                    signal="SIGTERM",
                    force=intent.force,
                ),
            )
        if context.elastic and (missed_s := self._stalls.missed_s()):
            context.record_event("was_away", seconds=round(missed_s, 1))
            # Nodes whose connections ended meanwhile may still be alive.
            self._elasticity.partition_suspected = True
        try:
            self._announcement.renew()
        except LeaseLost as error:
            context.put_event(context.node, error)
        except RECORD_ERRORS as error:  # retried at the next heartbeat
            if not self._heartbeat_failed:
                log.error("the coordinator's heartbeat cannot be written; will retry: %s", error)
            self._heartbeat_failed = True
        else:
            self._heartbeat_failed = False

    @property
    def has_ended_the_run(self) -> bool:
        return self._context.state_writer.is_final

    def on_agent_exit(self) -> None:
        """Ends a run that still waits for its nodes, after the agent of this process has ended.

        Lost connections are not reported until all nodes have joined.
        """
        context = self._context
        if context.membership.forming:
            reason = f"{context.node}: its agent left before all nodes had come"
            context.put_event(
                context.node,
                TerminationSignal(reason=reason, signal="SIGTERM", force=False),
            )
