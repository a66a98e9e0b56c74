"""The state that a coordinator's components share: the run, its members, and the event queue."""

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
    """A message of an agent, or an event about a node."""

    epoch: int  # the coordinator's epoch when the event was received
    node: str
    message: FromAgent | MemberLost | MemberUnfit | LeaseLost


class Context:
    """Shared state of a coordinator's components.

    `plan` is the plan in force. In an `elastic` run nodes may be lost, leave and join while the run
    continues.
    """

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
            max_restarts=rules.max_restarts,
            used=state_writer.restarts,
            limits=rules.max_restarts_by_cause,
            by_cause=state_writer.restarts_by_cause,
        )
        self.end_request: policy.Request | None = None
        #: A request of people to end the run that the disk could not take.
        self._unwritten_intent: Intent | None = None
        #: The furthest step that was completed in any epoch.
        self.furthest_step = -1
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
        """Puts `plan` in force; `ranked_nodes` are its nodes that hold ranks, in plan order."""
        self.plan = plan
        self.ranked_nodes = used_nodes(plan)

    # ---------------------------------------------------------------------------------- events

    def put_event(
        self,
        node: str,
        message: FromAgent | MemberLost | MemberUnfit | LeaseLost,
    ) -> None:
        self._queue.put_nowait(Event(self.epoch, node, message))

    def on_ticker_end(self, ticker: asyncio.Task[None]) -> None:
        """Raises the heartbeat task's error in `next_event`.

        Without heartbeats every node would consider a healthy coordinator lost, so a bug in that
        task must end the run.
        """
        if not ticker.cancelled() and (error := ticker.exception()):
            self._queue.put_nowait(error)

    async def next_event(self, until: float | None) -> Event | None:
        """Returns the next event, or None at loop time `until`.

        Raises LeaseLost once another coordinator holds a newer epoch.
        """
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
            # A message left in the queue from an earlier epoch must not count for this one.
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
        fields: dict[str, object] = {
            "epoch": self.epoch if epoch is None else epoch,
            "reason": decision.reason,
            "again": decision.again,
            "counted": decision.counted,
        }
        if cause:
            fields |= {
                "fault": cause.kind,
                "on": cause.node,
                "rank": cause.rank,
                "code": cause.code,
            }
        self.record_event("epoch_ended", **fields)

    # ---------------------------------------------------------------------------------- records

    async def retry_on_disk_errors(self, operation: Callable[[], Result]) -> Result:
        """Returns the result of `operation`, which is retried for at most RECORD_S after disk
        errors.

        Heartbeats continue meanwhile. Raises the last disk error, and LeaseLost.
        """
        insistence = Insistence()
        while True:
            try:
                return operation()
            except RECORD_ERRORS as error:
                insistence.refused(error)
            await asyncio.sleep(RECORD_AGAIN_S)

    async def begin_epoch(self) -> None:
        """Starts the next epoch. Its number is on disk before any agent receives it."""
        await self.retry_on_disk_errors(self.state_writer.lease_next_epoch)
        self.state_writer.begin_epoch()
        await self.retry_on_disk_errors(self.state_writer.retry)

    # ---------------------------------------------------------------------------------- members

    def remove_lost_node(self, node: str, reason: str) -> None:
        """Removes a member whose node is lost, and records the loss."""
        self.membership.remove(node, "node_lost", reason)
        self.state_writer.record_lost(node)

    def release_node(self, node: str, code: Exit, reason: str) -> None:
        """Sends a member away with exit code `code`, and removes it."""
        if member := self.members.get(node):
            member.channel.send(self.epoch, Done(code=int(code), reason=reason))
            self.membership.remove(node, "node_left", reason)
            self.state_writer.record_left(node)

    # ---------------------------------------------------------------------------------- the end

    @property
    def end_intent(self) -> Intent | None:
        """The request of people, made since this attempt began, that ends it, or None."""
        return self._unwritten_intent or due(self.folder, self.state_writer.first_intent)

    def request_end(self, signal: TerminationSignal) -> policy.Request:
        """Returns the request that ends the run: a cancel by people, else the first request."""
        if (intent := self.end_intent) and (self.end_request is None or intent.want == "end"):
            self.end_request = policy.Request(
                "cancelled" if intent.want == "end" else "stopped", intent.text
            )
        elif self.end_request is None:
            self.end_request = policy.Request("stopped", signal.reason)
        return self.end_request

    def end_before_start(self, signal: TerminationSignal) -> policy.Decision:
        """Returns the decision for a request to end the run before any worker has started."""
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
        """Returns the decision that ends a run outside an epoch.

        `kind` is the kind of its cause, "" if nothing failed.
        """
        cause = None
        if kind:
            cause = Cause(kind=kind, text=reason, epoch=self.epoch, node=node)
        return policy.Decision(
            again=False,
            state=state,
            reason=reason,
            budget=self.budget,
            code=int(code),
            cause=cause,
        )
