"""The members of a run: agents that have authenticated, joined, and still send heartbeats.

Their messages are passed on as one stream of (node, message), with `MemberLost` for a member that
is gone. What follows is decided elsewhere.
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
    silent_ticks: int = (
        0  # since its last message; ticks, so that pauses of this process do not count
    )
    ready: messages.Ready | None = None  # its answer to the Prepare of this epoch
    step: int | None = None  # furthest step of its workers
    slowdown: float | None = None  # own compute time over its peers', where that is known


@dataclass(frozen=True)
class MemberLost:
    """A member is gone. `member`: which, if another may have joined for the node since."""

    reason: str
    member: Member | None = None
    silent: bool = False  # it may live, paused or cut off


@dataclass(frozen=True)
class MemberUnfit:
    """A node of the plan has come and cannot be used. `code`: the exit code it was sent."""

    code: int
    reason: str


class Membership:
    """`tell(node, message)` gets the messages of members, `note(name, **fields)` writes an
    event."""

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
        """`elastic`: nodes may come at any time, and nodes that the plan does not know, too."""
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
        self.excluded: dict[str, str] = {}  # node -> why it may not come again
        self._refusals = RefusalLog(self._record_refusal)
        self._admission = Admission(
            run, key, messages.FromAgent, self._refusals, max(MAX_STRANGERS, len(expected))
        )
        self._tasks: set[asyncio.Task] = set()

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
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
                    break  # dropped meanwhile; what it still says is not for this run
                member.silent_ticks = 0
                self._on_message(member, *received)
        except asyncio.CancelledError:
            # the end of this task, and asyncio's streams log any other
            loss_reason = "the coordinator leaves"
        except (Refused, TimeoutError) as error:
            assert channel is not None
            reason = str(error) or "no join"
            loss_reason = f"refused: {reason}"
            self._refusals.refused(
                f"node {channel.peer}", str(writer.get_extra_info("peername")), reason
            )
        finally:
            if channel:
                await channel.close()
            if member and self.members.get(member.join.node) is member:
                self._deliver(member.join.node, MemberLost(loss_reason, member))
            self._tasks.discard(task)

    def _record_refusal(self, peer: str, reason: str, count: int) -> None:
        self._record_event("connection_refused", peer=peer, reason=reason, count=count)

    def _admit(
        self, channel: Channel, first_message: tuple[int, messages.FromAgent] | None
    ) -> Member | None:
        """Makes the newcomer a member, or tells it why not."""
        epoch, join = first_message or (-1, None)
        if not isinstance(join, messages.Join):
            raise Refused("the first message was no join")
        code = None
        reason = ""
        if join.node != channel.peer:
            raise Refused(f"{channel.peer!r} joined as {join.node!r}")
        if join.node in self.excluded:
            code = Exit.NODE
            reason = f"node {join.node} is excluded: {self.excluded[join.node]}"
        elif self._elastic and join.gpus >= self._plan.cluster.gpus_per_node:
            pass  # the plan in force is read when it is assigned
        elif join.node not in self._expected and not self._elastic:
            code = Exit.CONFIG
            reason = f"the plan gives no rank to node {join.node!r}"
        elif join.plan_hash != self._plan.hash and not self._elastic:
            code = Exit.CONFIG
            reason = (
                f"node {join.node} holds plan {join.plan_hash[:12]}, not {self._plan.hash[:12]}"
            )
        elif join.gpus < self._plan.cluster.gpus_per_node:
            gpus_present = join.gpus
            gpus_needed = self._plan.cluster.gpus_per_node
            code = Exit.NODE
            reason = f"node {join.node} has {gpus_present} of {gpus_needed} GPUs"
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

    def _check_late_join(self, node: str, epoch: int) -> None:
        """Refuses an agent that cannot join yet; it tries again."""
        if epoch > self._epoch():
            raise Refused(f"{node} follows epoch {epoch}, this is {self._epoch()}")
        if node in self.members:
            self._fence(node, "another agent has come for its node")
            raise Refused(f"{node} is still here")

    def _on_message(self, member: Member, epoch: int, message: messages.FromAgent) -> None:
        """Passes on messages of this epoch. Older ones may be under way until the agent has
        answered Ready."""
        node = member.join.node
        if epoch > self._epoch() or isinstance(message, messages.Join):
            raise Refused(f"{node} spoke out of turn: {type(message).__name__} of epoch {epoch}")
        if isinstance(
            message, messages.TerminationSignal | messages.Warm
        ):  # hold for the run, whatever the epoch
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
        """Excludes a member, and tells it so, so that it kills its workers even if it wakes up much
        later."""
        member = self.members[node]
        member.channel.send(self._epoch(), messages.Fenced(reason=reason))
        self._deliver(node, MemberLost(reason, member, silent))

    def remove(self, node: str, event: str, reason: str) -> None:
        """Removes a member; its connection is closed, and its messages are ignored."""
        member = self.members.pop(node, None)
        if member:
            self._record_event(event, on=node, reason=reason)
            closing = asyncio.create_task(member.channel.close())
            self._tasks.add(closing)
            closing.add_done_callback(self._tasks.discard)

    async def run_heartbeats(self, on_heartbeat: Callable[[], None]) -> None:
        """Sends heartbeats, with `each` called every time, and finds members that are silent.

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
