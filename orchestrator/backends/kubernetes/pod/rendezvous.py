"""The pods of a run find each other: every pod says which node it came to lie on, and all learn of all, at once.

Pods have no access to the API server. What they know is their own node (downward API), the name of index 0 in the run's
Service, and the run's key; the connection is the authenticated channel of the agents (docs/protocol.md). DNS that is
not there yet, a peer that is not there yet, and one that comes a second time are all normal here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from msgspec import Struct

from orchestrator.agent.protocol.channel import LONGEST_LINE, Channel, Refused, WrongKey, accept, connect
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # between looks for index 0; the last one repeats
_SAY_S = 30.0

log = logging.getLogger("orch.gather")


class Here(Struct, frozen=True, forbid_unknown_fields=True, tag="here", tag_field="kind"):
    """One pod: its completion index, and where it lies."""

    index: int
    node: str  # name of the Node
    address: str  # IP of the pod
    pod: str


class Go(Struct, frozen=True, forbid_unknown_fields=True, tag="go", tag_field="kind"):
    """All pods in order of their index, and the plan that index 0 made of them."""

    members: list[Here]
    plan_hash: str


class Leader:
    """Index 0's side. `async with` opens the port; `members` waits; `release` lets all go on."""

    def __init__(self, own: Here, count: int, run: str, key: bytes, port: int):
        self._own, self._count, self._run, self._key, self._port = own, count, run, key, port
        self._members: dict[int, tuple[Here, Channel | None]] = {own.index: (own, None)}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Leader:
        self._server = await asyncio.start_server(self._connected, self._own.address, self._port, limit=LONGEST_LINE)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for _, channel in list(self._members.values()):
            if channel:
                await channel.close()

    async def members(self, timeout_s: float) -> list[Here]:
        """Every pod, in order. OrchError (76) when some have not come in time: the others must not hold their nodes."""
        end = asyncio.get_running_loop().time() + timeout_s
        while len(self._members) < self._count:
            left = end - asyncio.get_running_loop().time()
            missing = [str(i) for i in range(self._count) if i not in self._members]
            if left <= 0:
                raise OrchError(f"pods {_some(missing)} did not come within {timeout_s:g} s", Exit.CAPACITY)
            log.info("%d of %d pods are here, waiting for %s", len(self._members), self._count, _some(missing))
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(_SAY_S, left))
        return [self._members[index][0] for index in range(self._count)]

    def release(self, go: Go) -> None:
        for _, channel in self._members.values():
            if channel:
                channel.send(0, go)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await accept(reader, writer, self._run, self._key, Here)
            received = await channel.receive()
        except (Refused, OSError) as error:
            log.warning("refused a connection: %s", error)
            writer.transport.abort()
            return
        here = received[1] if received else None
        if here is None or not 0 < here.index < self._count:
            channel.abort()
            return
        before = self._members.get(here.index)
        if before and before[1]:
            before[1].abort()  # its pod was replaced, or lost us for a moment
        self._members[here.index] = here, channel
        self._changed.set()
        with contextlib.suppress(Refused):
            await channel.receive()  # nothing more is said: this ends when the pod does
        if self._members.get(here.index, (None, None))[1] is channel:
            del self._members[here.index]
            self._changed.set()


async def follow(own: Here, host: str, port: int, run: str, key: bytes, timeout_s: float) -> Go:
    """Every other pod's side: find index 0, wait to be released. OrchError: 76 when that takes too long, 78 for a wrong
    key.
    """
    loop = asyncio.get_running_loop()
    end, attempt, problem = loop.time() + timeout_s, 0, "not tried"
    while loop.time() < end:
        try:
            channel = await asyncio.wait_for(connect(host, port, run, f"pod-{own.index}", key, Go), 15.0)
        except WrongKey as error:
            raise OrchError(str(error), Exit.SECURITY) from None
        except (OSError, Refused, TimeoutError) as error:  # no name yet, nobody there yet
            if str(error) != problem:
                log.info("looking for %s:%d: %s", host, port, error)
            problem = str(error)
        else:
            if go := await _wait_for_go(channel, own, end):
                return go
            problem, attempt = "index 0 went away", 0
        await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
        attempt += 1
    raise OrchError(f"index 0 ({host}:{port}) did not let us go on within {timeout_s:g} s: {problem}", Exit.CAPACITY)


async def _wait_for_go(channel: Channel, own: Here, end: float) -> Go | None:
    """None when index 0 went away first. The connection never outlives this call: it is what says that we are here."""
    try:
        channel.send(0, own)
        log.info("found index 0, waiting for the others")
        left = end - asyncio.get_running_loop().time()
        received = await asyncio.wait_for(channel.receive(), max(0.1, left))
        return received[1] if received else None
    except (Refused, TimeoutError):
        return None
    finally:
        channel.abort()


async def gather(
    own: Here, count: int, host: str, port: int, run: str, key: bytes, timeout_s: float,
    settle: Callable[[list[Here]], str],
) -> Go:  # fmt: skip
    """One pod's whole part. `settle`: what index 0 does with the members before it lets them go; returns the plan's
    hash."""
    looks = asyncio.create_task(_look_up())
    try:
        if own.index:
            return await follow(own, host, port, run, key, timeout_s)
        async with Leader(own, count, run, key, port) as leader:
            members = await leader.members(timeout_s)
            go = Go(members, settle(members))
            leader.release(go)
        return go
    finally:
        looks.cancel()


async def _look_up() -> None:
    """A signal that comes between Python's last look and a long wait is acted upon when that ends: let none be long."""
    while True:
        await asyncio.sleep(1.0)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
