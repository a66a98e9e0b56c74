"""Rendezvous of a run's pods: every pod sends the node that it is on, and all receive the complete
list at once.

Pods have no access to the API server. They know their own node (downward API), the name of pod 0 in
the run's Service, and the run's key; the connection is the agents' authenticated channel
(docs/protocol.md). A DNS name or a peer that does not exist yet, and a peer that comes a second
time, are normal here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from msgspec import Struct

from orchestrator.agent.protocol.admission import BACKLOG, MAX_STRANGERS, Admission, RefusalLog
from orchestrator.agent.protocol.channel import READ_LIMIT, Channel, Refused, WrongKey, connect
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # between tries to reach pod 0; the last one repeats
_LOG_S = 30.0
_JOIN_S = 10.0

log = logging.getLogger("orch.rendezvous")


class Join(Struct, frozen=True, forbid_unknown_fields=True, tag="join", tag_field="kind"):
    """The message of a pod to pod 0: its completion index, and where it runs."""

    index: int
    node: str  # name of the Node
    address: str  # IP of the pod
    pod: str


class Start(Struct, frozen=True, forbid_unknown_fields=True, tag="start", tag_field="kind"):
    """The answer of pod 0: all pods in order of their index, and the hash of the plan that it made
    for them."""

    members: list[Join]
    plan_hash: str


class Leader:
    """The side of pod 0. `async with` opens the port; `members` waits for all pods; `release`
    answers them."""

    def __init__(
        self,
        this_pod: Join,
        count: int,
        run: str,
        key: bytes,
        port: int,
    ):
        self._own = this_pod
        self._count = count
        self._port = port
        self._admission = Admission(
            run,
            key,
            Join,
            RefusalLog(_log_refusal),
            max(MAX_STRANGERS, count),
        )
        self._members: dict[int, tuple[Join, Channel | None]] = {this_pod.index: (this_pod, None)}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Leader:
        self._server = await asyncio.start_server(
            self._connected,
            self._own.address,
            self._port,
            limit=READ_LIMIT,
            backlog=BACKLOG,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self._admission.close()
        for _, channel in list(self._members.values()):
            if channel:
                await channel.close()

    async def members(self, timeout_s: float) -> list[Join]:
        """Returns every pod, in order of the indices.

        OrchError (76) if some have not joined in time, because the others must not hold their
        nodes.
        """
        end = asyncio.get_running_loop().time() + timeout_s
        while len(self._members) < self._count:
            remaining_s = end - asyncio.get_running_loop().time()
            missing = [str(i) for i in range(self._count) if i not in self._members]
            if remaining_s <= 0:
                message = f"pods {_some(missing)} did not join within {timeout_s:g} s"
                raise OrchError(message, Exit.CAPACITY)
            joined = f"{len(self._members)} of {self._count} pods have joined"
            log.info("%s, waiting for %s", joined, _some(missing))
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(_LOG_S, remaining_s))
        return [self._members[index][0] for index in range(self._count)]

    def release(self, start: Start) -> None:
        """Sends `start` to every other pod."""
        for _, channel in self._members.values():
            if channel:
                channel.send(0, start)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await self._admission.admit(reader, writer)
        if channel is None:
            return
        try:
            received = await asyncio.wait_for(channel.receive(), _JOIN_S)
        except (Refused, TimeoutError) as error:
            log.warning("%s sent no join: %s", channel.peer, error)
            channel.abort()
            return
        join = received[1] if received else None
        if not isinstance(join, Join) or not 0 < join.index < self._count:
            channel.abort()
            return
        earlier = self._members.get(join.index)
        if earlier and earlier[1]:
            earlier[1].abort()  # its pod was replaced, or lost the connection for a moment
        self._members[join.index] = join, channel
        self._changed.set()
        with contextlib.suppress(Refused):
            await channel.receive()  # nothing more is sent: this ends when the pod does
        if self._members.get(join.index, (None, None))[1] is channel:
            del self._members[join.index]
            self._changed.set()


async def rendezvous(
    this_pod: Join,
    count: int,
    *,
    host: str,
    port: int,
    run: str,
    key: bytes,
    timeout_s: float,
    assign: Callable[[list[Join]], str],
) -> Start:
    """Completes the rendezvous of `count` pods as `this_pod`. Returns all pods, and the hash of
    their plan.

    `assign`: called by pod 0 with the members before it answers them; returns the plan's hash.
    OrchError: 76 if it takes longer than `timeout_s`, 78 for a wrong key.
    """
    wake_ups = asyncio.create_task(_wake_up())
    try:
        if this_pod.index:
            return await _join(
                this_pod,
                host=host,
                port=port,
                run=run,
                key=key,
                timeout_s=timeout_s,
            )
        async with Leader(this_pod, count, run, key, port) as leader:
            members = await leader.members(timeout_s)
            start = Start(members, assign(members))
            leader.release(start)
        return start
    finally:
        wake_ups.cancel()


async def _join(
    this_pod: Join,
    *,
    host: str,
    port: int,
    run: str,
    key: bytes,
    timeout_s: float,
) -> Start:
    """The side of every other pod: connects to pod 0, and waits for its answer."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    attempt = 0
    problem = "not tried"
    while loop.time() < end:
        try:
            connecting = connect(
                host,
                port,
                run,
                f"pod-{this_pod.index}",
                key=key,
                message_type=Start,
            )
            channel = await asyncio.wait_for(connecting, 15.0)
        except WrongKey as error:
            raise OrchError(str(error), Exit.SECURITY) from None
        except (OSError, Refused, TimeoutError) as error:  # no DNS name yet, or no listener yet
            if str(error) != problem:
                log.info("connecting to pod 0 at %s:%d: %s", host, port, error)
            problem = str(error)
        else:
            if start := await _wait_for_start(channel, this_pod, end):
                return start
            problem = "pod 0 closed the connection"
            attempt = 0
        await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
        attempt += 1
    message = f"pod 0 ({host}:{port}) did not complete the rendezvous within {timeout_s:g} s"
    raise OrchError(f"{message}: {problem}", Exit.CAPACITY)


async def _wait_for_start(channel: Channel, this_pod: Join, end: float) -> Start | None:
    """Waits for the answer; None if pod 0 closed the connection. The connection never outlives this
    call: an open one means that this pod is present."""
    try:
        channel.send(0, this_pod)
        log.info("joined pod 0, waiting for the others")
        remaining_s = end - asyncio.get_running_loop().time()
        received = await asyncio.wait_for(channel.receive(), max(0.1, remaining_s))
        return received[1] if received and isinstance(received[1], Start) else None
    except (Refused, TimeoutError):
        return None
    finally:
        channel.abort()


def _log_refusal(peer: str, reason: str, count: int) -> None:
    log.warning("refused %d connections, the last from %s: %s", count, peer, reason)


async def _wake_up() -> None:
    """Keeps the loop from waiting long: a signal that comes just before a wait is handled only
    after the wait."""
    while True:
        await asyncio.sleep(1.0)


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:8])
    return f"{listed} and {len(names) - 8} more" if len(names) > 8 else listed
