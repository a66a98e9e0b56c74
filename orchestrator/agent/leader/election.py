"""How an agent of an elastic run finds its coordinator, or becomes it.

Nobody votes. A coordinator is who has claimed the newest epoch in the run folder (`launch.claims`); while it lives it
counts a beat up in `coordinator.json`. An agent that has lost it looks there again and again. Only when nobody listens
any more, or when the beat has stood still for too long, it claims the next epoch: at once if it is the first in the
plan's order, later the further back it stands, so that one claims and the others find it. Should two claim all the
same, one of them makes the file, and a coordinator that is only frozen finds the newer claim before it writes again.
Agents count their own ticks; no clock of another host is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module

import msgspec

from orchestrator.agent.protocol.channel import Channel, Refused, WrongKey, connect
from orchestrator.agent.protocol.messages import FromCoordinator
from orchestrator.plan.document import Frozen
from orchestrator.run.epoch_lease import EpochLease, LeaseLost
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Policy
from orchestrator.run.state import read_state
from orchestrator.run.untrusted import UNREADABLE

from .world_sizes import PLANNER

TICK_S = 0.25
TURN_TICKS = 4  # from one in the order to the next
_CONNECT_S = 5.0
_PREPARE_S = 5.0  # after the workers' start, which has the processor first


class CoordinatorAddress(Frozen):
    """coordinator.json. The last three only in elastic runs."""

    host: str
    port: int
    node: str = ""
    epoch: int = -1  # the one by whose claim it coordinates
    beat: int = 0


def find(folder: RunFolder) -> CoordinatorAddress | None:
    try:
        return msgspec.json.decode(folder.coordinator.read_bytes(), type=CoordinatorAddress)
    except (OSError, *UNREADABLE):
        return None


def turn_of(node: str, order: Sequence[str], gone: str) -> int:
    """Whose turn it is to succeed `gone`: 0 for the first of the others; nodes that hold no rank come last."""
    rest = [name for name in order if name != gone]
    return rest.index(node) if node in rest else len(rest)


class Watch:
    """What one agent sees of the coordinator's life, tick by tick. Pure."""

    def __init__(self, patience_ticks: int):
        self._timeout_ticks = patience_ticks
        self._seen: tuple[int, int, int] | None = None
        self._still = 0  # ticks since anything has changed

    def tick(self, newest: int, seen: CoordinatorAddress | None, refused: bool, fresh: bool, turn: int) -> bool:
        """Whether to claim the next epoch now.

        `newest`: the newest claim. `refused`: nobody listens at `seen`. `fresh`: this attempt of the run has never had
        a coordinator. When somebody has claimed and does not listen yet, it gets the whole patience to do so.
        """
        now = (newest, seen.epoch if seen else -1, seen.beat if seen else -1)
        self._still = self._still + 1 if now == self._seen else 0
        self._seen = now
        dead = refused and seen is not None and seen.epoch == newest
        wait = 0 if dead or (fresh and turn == 0) else self._timeout_ticks
        return self._still >= wait + turn * TURN_TICKS


class LeaderElection:
    """One agent's part in it. `lead(claims)` makes this process the coordinator, by right of those claims."""

    def __init__(self, folder: RunFolder, node: str, key: bytes, rules: Policy, lead: Callable[[EpochLease], None]):
        self._folder, self._node, self._key, self._rules, self._lead = folder, node, key, rules, lead
        self._preparing: asyncio.Task | None = None

    def prepare(self, order: Sequence[str]) -> None:
        """Soon, in the node whose turn would be next: import what a coordinator plans with."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._prepare(order))

    async def _prepare(self, order: Sequence[str]) -> None:
        await asyncio.sleep(_PREPARE_S)
        seen = find(self._folder)
        if seen is not None and turn_of(self._node, order, seen.node) == 0:
            await asyncio.to_thread(import_module, PLANNER)

    async def join(self, epoch: int, order: Sequence[str], over: asyncio.Future) -> Channel | None:
        """A channel to the coordinator, wherever it is by now. None when `over` is done, when the run has ended
        meanwhile, or nobody could be found.

        `epoch`: the newest that this agent has followed; `order`: of the nodes, as its plan has them. Raises WrongKey.
        """
        loop, hang_timeout_s = asyncio.get_running_loop(), max(2.0, self._rules.heartbeat_timeout_s)
        watch = Watch(round(hang_timeout_s / TICK_S))
        end = loop.time() + max(self._rules.join_timeout_s, 4 * hang_timeout_s)
        call: asyncio.Task[Channel] | None = None  # a frozen coordinator takes the call and never answers
        try:
            while loop.time() < end and not over.done():
                claims = EpochLease(self._folder, self._node)
                seen, newest = find(self._folder), claims.newest
                if call is None and seen is not None and seen.epoch == newest:
                    call = asyncio.create_task(self._call(seen))
                await asyncio.wait({over, call} if call else {over}, timeout=TICK_S)
                refused = False
                if call and call.done():
                    try:
                        return call.result()
                    except WrongKey:
                        raise
                    except (OSError, Refused, TimeoutError) as error:
                        call, refused = None, isinstance(error, ConnectionRefusedError)
                state = read_state(self._folder)
                if state.is_final:
                    break
                fresh = seen is None and state.state == "pending" and newest <= state.epoch
                turn = turn_of(self._node, order, seen.node if seen else "")
                if watch.tick(newest, seen, refused, fresh, turn):
                    with contextlib.suppress(LeaseLost):
                        claims.take(max(newest, state.epoch, epoch) + 1)
                        self._lead(claims)
                        call = _hang_up(call)
                if refused:
                    await asyncio.wait({over}, timeout=TICK_S)
        finally:
            _hang_up(call)
        return None

    async def _call(self, seen: CoordinatorAddress) -> Channel:
        arguments = self._folder.run_id, self._node, self._key, FromCoordinator
        return await asyncio.wait_for(connect(seen.host, seen.port, *arguments), _CONNECT_S)


def _hang_up(call: asyncio.Task | None) -> None:
    if call is not None and not call.done():
        call.cancel()
