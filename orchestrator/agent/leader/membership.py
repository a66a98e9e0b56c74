"""The members of a run: agents that have authenticated, joined, and still send heartbeats.

Their messages are delivered as one stream of (node, message), with `MemberLost` for a member that
is gone. The consequences are decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.agent.protocol import messages
from orchestrator.agent.protocol.admission import MAX_STRANGERS, Admission, RefusalLog
from orchestrator.agent.protocol.channel import Channel, Refused
from orchestrator.agent.protocol.heartbeat import HeartbeatTimer, timeout_ticks
from orchestrator.plan import Exit, Plan

_TICK_S = 0.25
_JOIN_S = 10.0


@dataclass
class Member:
    """An agent that belongs to the run."""

    channel: Channel
    join: messages.Join
    warm: bool = True  # its workers would start at once
    #: Ticks since its last message. Ticks, not seconds, so that pauses of this process do not
    #: count.
    silent_ticks: int = 0
    ready: messages.Ready | None = None  # its answer to the Prepare of this epoch
    step: int | None = None  # furthest step of its workers
    slowdown: float | None = None  # its own compute time over its peers', if known


@dataclass(frozen=True)
class MemberLost:
    """A member is gone. `member` names it if another agent may have joined for the node since."""

    reason: str
    member: Member | None = None
    silent: bool = False  # it may be alive: paused, or cut off

    def concerns(self, member: Member | None) -> bool:
        """Returns whether the loss is that of `member`, the node's current one."""
        return self.member in (None, member)


@dataclass(frozen=True)
class MemberUnfit:
    """A node of the plan that has joined cannot be used. `code` is the exit code it was sent."""

    code: int
    reason: str


class Membership:
    """Accepts agents, and watches those that have joined.

    `deliver(node, message)` receives the messages of members; `record_event(name, **fields)` writes
    an event.
    """

    def __init__(
        self,
        run: str,
        plan: Plan,
        key: bytes,
        expected: list[str],
        epoch: Callable[[], int],
        deliver: Callable[[str, messages.FromAgent | MemberLost | MemberUnfit], None],
        record_event: Callable[..., None],
        heartbeat_timeout_s: float,
        elastic: bool = False,
    ):
        """`elastic` lets nodes join at any time, also nodes that are not in the plan."""
        self.members: dict[str, Member] = {}
        self.forming = True  # the first nodes are awaited
        self._run = run
        self._plan = plan
        self._key = key
        self._expected = expected
        self._epoch = epoch
        self._deliver = deliver
        self._record_event = record_event
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._elastic = elastic
        self.excluded: dict[str, str] = {}  # node -> reason for which it may not join
        self._refusals = RefusalLog(self._record_refusal)
        self._admission = Admission(
            run,
            key,
            messages.FromAgent,
            self._refusals,
            max_strangers=max(MAX_STRANGERS, len(expected)),
        )
        self._tasks: set[asyncio.Task] = set()

    async def serve_connection(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serves one connection, from the greeting to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        channel = member = None
        loss_reason = "connection closed"
        try:
            channel = await self._admission.admit(reader, writer)
            if channel is None:
                return
            first_message = await asyncio.wait_for(channel.receive(), _JOIN_S)
            member = self._admit(channel, first_message)
            while member and (received := await channel.receive()) is not None:
                if self.members.get(member.join.node) is not member:
                    break  # removed meanwhile: its remaining messages do not count
                member.silent_ticks = 0
                self._on_message(member, *received)
        except asyncio.CancelledError:
            # Ends here instead of in asyncio, whose streams would log it.
            loss_reason = "the coordinator leaves"
        except (Refused, TimeoutError) as error:
            assert channel is not None
            reason = str(error) or "no join message"
            loss_reason = f"refused: {reason}"
            self._refusals.refused(
                f"node {channel.peer}",
                str(writer.get_extra_info("peername")),
                reason,
            )
        finally:
            if channel:
                await channel.close()
            if member and self.members.get(member.join.node) is member:
                self._deliver(member.join.node, MemberLost(loss_reason, member))
            self._tasks.discard(task)

    def _record_refusal(self, peer: str, reason: str, count: int) -> None:
        self._record_event(
            "connection_refused",
            peer=peer,
            reason=reason,
            count=count,
        )

    def _admit(
        self,
        channel: Channel,
        first_message: tuple[int, messages.FromAgent] | None,
    ) -> Member | None:
        """Makes the newcomer a member, or sends it the reason why it cannot be one."""
        epoch, join = first_message or (-1, None)
        if not isinstance(join, messages.Join):
            raise Refused("the first message was not a join")
        if join.node != channel.peer:
            raise Refused(f"{channel.peer!r} joined as {join.node!r}")
        code, reason = self._unfitness(join)
        if code is not None:
            channel.send(self._epoch(), messages.Done(code=int(code), reason=reason))
            self._record_event("join_refused", on=join.node, reason=reason)
            if join.node in self._expected and self.forming:
                self._deliver(join.node, MemberUnfit(int(code), reason))
            return None
        if self._elastic:
            self._check_late_join(join.node, epoch)
        elif not self.forming or join.node in self.members or epoch > self._epoch():
            reason = f"epoch {self._epoch()} runs without this agent"
            channel.send(self._epoch(), messages.Fenced(reason=reason))
            self._record_event("join_fenced", on=join.node, epoch_of_agent=epoch)
            return None
        member = self.members[join.node] = Member(channel, join, join.warm)
        self._deliver(join.node, join)
        return member

    def _unfitness(self, join: messages.Join) -> tuple[Exit | None, str]:
        """Returns the exit code and the reason for a node that cannot be used, or (None, "")."""
        gpus_needed = self._plan.cluster.gpus_per_node
        if join.node in self.excluded:
            return Exit.NODE, f"node {join.node} is excluded: {self.excluded[join.node]}"
        if not self._elastic:  # nodes of an elastic run read the plan when ranks are assigned
            if join.node not in self._expected:
                return Exit.CONFIG, f"the plan gives no rank to node {join.node!r}"
            if join.plan_hash != self._plan.hash:
                return Exit.CONFIG, (
                    f"node {join.node} holds plan {join.plan_hash[:12]}, not {self._plan.hash[:12]}"
                )
        if join.gpus < gpus_needed:
            return Exit.NODE, f"node {join.node} has {join.gpus} of {gpus_needed} GPUs"
        return None, ""

    def _check_late_join(self, node: str, epoch: int) -> None:
        """Refuses an agent of an elastic run that cannot join yet; it will try again."""
        if epoch > self._epoch():
            raise Refused(f"{node} follows epoch {epoch}, this is {self._epoch()}")
        if node in self.members:
            self._fence(node, "another agent has joined for its node")
            raise Refused(f"the last agent of {node} is still a member")

    def _on_message(self, member: Member, epoch: int, message: messages.FromAgent) -> None:
        """Delivers messages of this epoch.

        Older messages may arrive until the agent has answered Ready.
        """
        node = member.join.node
        if epoch > self._epoch() or isinstance(message, messages.Join):
            raise Refused(f"{node} spoke out of turn: {type(message).__name__} of epoch {epoch}")
        if isinstance(message, messages.TerminationSignal | messages.Warm):  # valid in every epoch
            member.warm = member.warm or isinstance(message, messages.Warm)
            self._deliver(node, message)
        elif epoch < self._epoch():
            if member.ready is not None:
                self._fence(node, f"it spoke for epoch {epoch}, this is {self._epoch()}")
        else:
            if isinstance(message, messages.AgentAlive):
                member.step = message.step
            self._deliver(node, message)

    def _fence(self, node: str, reason: str, silent: bool = False) -> None:
        """Reports a member as lost, and orders it to kill its workers, however late it wakes up."""
        member = self.members[node]
        member.channel.send(self._epoch(), messages.Fenced(reason=reason))
        self._deliver(node, MemberLost(reason, member, silent))

    def remove(self, node: str, event: str, reason: str) -> None:
        """Removes a member, closes its connection, and ignores its further messages."""
        member = self.members.pop(node, None)
        if member:
            self._record_event(event, on=node, reason=reason)
            closing = asyncio.create_task(member.channel.close())
            self._tasks.add(closing)
            closing.add_done_callback(self._tasks.discard)

    async def run_heartbeats(self, on_heartbeat: Callable[[], None]) -> None:
        """Sends heartbeats, calls `on_heartbeat` each time, and fences members that are silent.

        See protocol/heartbeat.py.
        """
        timeout = timeout_ticks(self._heartbeat_timeout_s, _TICK_S)
        clock = asyncio.get_running_loop().time
        timer = HeartbeatTimer(_TICK_S, clock())
        while True:
            began = clock()
            await asyncio.sleep(_TICK_S)
            due, in_time = timer.tick(began, clock())
            if due:
                on_heartbeat()
                self._refusals.flush()
            for node, member in list(self.members.items()):
                if due:
                    member.channel.send(
                        self._epoch(), messages.CoordinatorAlive(slowdown=member.slowdown)
                    )
                member.silent_ticks += in_time
                if in_time and member.silent_ticks == timeout:
                    self._fence(node, f"silent for {self._heartbeat_timeout_s:g} s", silent=True)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._admission.close()
