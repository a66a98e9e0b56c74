"""What the components of a coordinator share: the run, its members, and the queue of events that
have come in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from orchestrator.agent.faults import policy
from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.protocol.messages import Done, FromAgent, TerminationSignal
from orchestrator.plan import Exit, Plan
from orchestrator.run.epoch_lease import LeaseLost
from orchestrator.run.folder import RECORD_AGAIN_S, RECORD_ERRORS, Insistence, RunFolder
from orchestrator.run.intent import Intent, due, unwritten_end
from orchestrator.run.request import Policy, used_nodes
from orchestrator.run.state import Cause

from .membership import Member, MemberLost, Membership, MemberUnfit
from .state_writer import StateWriter

log = logging.getLogger("orch.coordinator")
Result = TypeVar("Result")


class Event(NamedTuple):
    epoch: int  # in which it was received
    node: str
    message: FromAgent | MemberLost | MemberUnfit | LeaseLost


class Context:
    """`plan`: the one in force. `elastic`: nodes may be lost, leave and join while the run goes
    on."""

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        rules: Policy,
        key: bytes,
        node: str,
        recorder: Recorder,
        state_writer: StateWriter,
        elastic: bool,
    ):
        self.folder = folder
        self.rules = rules
        self.node = node
        self.elastic = elastic
        self.recorder = recorder
        self.state_writer = state_writer
        self.plan = plan
        self.ranked_nodes = used_nodes(plan)
        self.budget = policy.Budget(
            rules.max_restarts,
            state_writer.restarts,
            0,
            rules.max_restarts_by_cause,
            state_writer.restarts_by_cause,
        )
        self.end_request: policy.Request | None = None
        self._unwritten_intent: Intent | None = None  # what people want and the disk does not have
        self.furthest_step = -1  # completed in any epoch
        self._queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self.membership = Membership(
            run=folder.run_id,
            plan=plan,
            key=key,
            expected=self.ranked_nodes,
            epoch=lambda: state_writer.epoch,
            deliver=self.put_event,
            record_event=self.record_event,
            heartbeat_timeout_s=rules.heartbeat_timeout_s,
            elastic=elastic,
        )
        self.membership.excluded.update(state_writer.excluded)

    @property
    def members(self) -> dict[str, Member]:
        return self.membership.members

    @property
    def epoch(self) -> int:
        return self.state_writer.epoch

    def set_plan(self, plan: Plan) -> None:
        """Makes this the plan in force. `ranked`: its nodes that hold ranks, in the plan's
        order."""
        self.plan = plan
        self.ranked_nodes = used_nodes(plan)

    # ---------------------------------------------------------------------------------- events

    def put_event(
        self, node: str, message: FromAgent | MemberLost | MemberUnfit | LeaseLost
    ) -> None:
        self._queue.put_nowait(Event(self.epoch, node, message))

    def on_ticker_end(self, ticker: asyncio.Task[None]) -> None:
        """Without heartbeats every node would take a healthy coordinator for lost: a bug in them is
        to be seen."""
        if not ticker.cancelled() and (error := ticker.exception()):
            self._queue.put_nowait(error)

    async def next_event(self, until: float | None) -> Event | None:
        """The next event; None at loop time `until`. Raises LeaseLost once another coordinator has
        claimed an epoch."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                timeout_s = None if until is None else max(0.0, until - loop.time())
                event = await asyncio.wait_for(self._queue.get(), timeout_s)
            except TimeoutError:
                return None
            if isinstance(event, BaseException):
                raise event
            if isinstance(event.message, LeaseLost) and event.epoch == self.epoch:
                raise event.message
            if isinstance(event.message, TerminationSignal) and event.message.by_people:
                self._unwritten_intent = unwritten_end(event.message.force)
            # an answer that was still in the queue when its epoch ended must not count for the next
            # one
            if event.epoch == self.epoch or isinstance(
                event.message, MemberLost | TerminationSignal
            ):
                return event

    def record_event(self, name: str, **fields: object) -> None:
        """Logs an event, and writes it to the run folder."""
        log.info("%s %s", name, " ".join(f"{key}={value}" for key, value in fields.items()))
        self.recorder.event(name, **fields)

    def record_epoch_end(self, decision: policy.Decision, epoch: int | None = None) -> None:
        cause = decision.cause
        about = (
            {"fault": cause.kind, "on": cause.node, "rank": cause.rank, "code": cause.code}
            if cause
            else {}
        )
        said = {
            "reason": decision.reason,
            "again": decision.again,
            "counted": decision.counted,
            **about,
        }
        self.record_event("epoch_ended", epoch=self.epoch if epoch is None else epoch, **said)

    # ---------------------------------------------------------------------------------- records

    async def retry_on_disk_errors(self, operation: Callable[[], Result]) -> Result:
        """What `record` returns, called until the disk lets it, in at most RECORD_S; heartbeats go
        on meanwhile.

        Raises what it has raised last, and LeaseLost.
        """
        insistence = Insistence()
        while True:
            try:
                return operation()
            except RECORD_ERRORS as error:
                insistence.refused(error)
            await asyncio.sleep(RECORD_AGAIN_S)

    async def begin_epoch(self) -> None:
        """Starts the next epoch, which is on disk before anybody hears of it."""
        await self.retry_on_disk_errors(self.state_writer.lease_next_epoch)
        self.state_writer.begin_epoch()
        await self.retry_on_disk_errors(self.state_writer.retry)

    # ---------------------------------------------------------------------------------- members

    def remove_lost_node(self, node: str, reason: str) -> None:
        """Removes a member that is lost, and records it."""
        self.membership.remove(node, "node_lost", reason)
        self.state_writer.record_lost(node)

    def release_node(self, node: str, code: Exit, reason: str) -> None:
        """Tells a member to exit with `code`, and removes it."""
        if member := self.members.get(node):
            member.channel.send(self.epoch, Done(code=int(code), reason=reason))
            self.membership.remove(node, "node_left", reason)
            self.state_writer.record_left(node)

    # ---------------------------------------------------------------------------------- the end

    @property
    def end_intent(self) -> Intent | None:
        """What people have asked for since this attempt began, if it has to end for that."""
        return self._unwritten_intent or due(self.folder, self.state_writer.first_intent)

    def request_end(self, signal: TerminationSignal) -> policy.Request:
        """Notes that somebody asked for the end of the run; the first request counts, or what
        people have asked."""
        if (intent := self.end_intent) and (self.end_request is None or intent.want == "end"):
            self.end_request = policy.Request(
                "cancelled" if intent.want == "end" else "stopped", intent.text
            )
        elif self.end_request is None:
            self.end_request = policy.Request("stopped", signal.reason)
        return self.end_request

    def end_before_start(self, signal: TerminationSignal) -> policy.Decision:
        """The decision when the end is asked for before any worker has started."""
        request = self.request_end(signal)
        return self.end_run(request.kind, Exit.RESTART, f"{request.reason}; nothing had started")

    def end_run(
        self,
        state: policy.FinalState,
        code: int,
        reason: str,
        kind: str = "",
        node: str | None = None,
    ) -> policy.Decision:
        """The decision that ends a run outside an epoch. `kind`: of the cause; "" for none."""
        cause = Cause(kind=kind, text=reason, epoch=self.epoch, node=node) if kind else None
        return policy.Decision(False, state, reason, self.budget, int(code), cause=cause)
