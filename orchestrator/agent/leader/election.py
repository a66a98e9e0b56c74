"""Leader election: how an agent of an elastic run finds its coordinator, or becomes it.

There is no vote. The coordinator is the process that has claimed the newest epoch in the run folder
(`run.epoch_lease`); while it runs it counts heartbeats in `coordinator.json`. An agent that has
lost it polls that file. If nobody listens there any more, or the heartbeat has stood still for too
long, it claims the next epoch: at once if it is the first in the plan's order, later the further
back it stands, so that one claims and the others find it. If two claim, one of them makes the file;
a coordinator that was only paused finds the newer claim before it writes. Agents count their own
ticks and read no clock of another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TypeVar

import msgspec

from orchestrator.agent.node.connection import CoordinatorAddress, NoCoordinator, read_address
from orchestrator.agent.protocol.channel import Channel, Refused, WrongKey, connect
from orchestrator.agent.protocol.messages import FromCoordinator
from orchestrator.plan import Exit
from orchestrator.run.epoch_lease import EpochLease, LeaseLost
from orchestrator.run.folder import RECORD_ERRORS, RunFolder, write_private
from orchestrator.run.request import Policy
from orchestrator.run.state import RunState, read_state

from .state_writer import StateWriter

PLANNER = (  # with what it imports, half a second of processor time
    "orchestrator.planner.elastic.replan"
)
TICK_S = 0.25
TURN_TICKS = 4  # from one in the order to the next
_CONNECT_S = 5.0
_BELIEVED_HEARTBEATS = 3
_PREPARE_S = 5.0  # after the workers' start, which has the processor first

log = logging.getLogger("orch.agent")
Record = TypeVar("Record")


def turn_of(node: str, order: Sequence[str], lost_node: str) -> int:
    """Whose turn it is to succeed `gone`: 0 for the first of the others; nodes that hold no rank
    come last."""
    successors = [candidate for candidate in order if candidate != lost_node]
    return successors.index(node) if node in successors else len(successors)


class Announcement:
    """`coordinator.json`: where the coordinator listens. With a lease it also shows that the
    coordinator is alive."""

    def __init__(self, folder: RunFolder, state_writer: StateWriter, node: str):
        self._folder = folder
        self._state_writer = state_writer
        self._node = node
        self._address: CoordinatorAddress | None = None
        self.paused = False  # others may claim the run

    def begin(self, host: str, port: int) -> None:
        self._address = CoordinatorAddress(host=host, port=port)
        if self._state_writer.leased_epoch < 0:
            write_private(self._folder.coordinator, msgspec.json.encode(self._address))
        else:
            self._address = msgspec.structs.replace(self._address, node=self._node)
            self.renew()

    def renew(self) -> None:
        """Once a heartbeat, and with a new claim. Raises LeaseLost if another process has claimed a
        newer epoch."""
        if self._state_writer.leased_epoch < 0:
            self._state_writer.retry()
        elif self._address is not None and not self.paused:
            self._state_writer.rewrite_if_replaced()
            heartbeats = self._address.heartbeats + 1
            self._address = msgspec.structs.replace(
                self._address, epoch=self._state_writer.leased_epoch, heartbeats=heartbeats
            )
            write_private(
                self._folder.coordinator, msgspec.json.encode(self._address), durable=False
            )


class CoordinatorMonitor:
    """What one agent sees of the coordinator, tick by tick. Pure."""

    def __init__(self, timeout_ticks: int):
        self._timeout_ticks = timeout_ticks
        self._last_sighting: tuple[int, int, int] | None = None
        self._unchanged_ticks = 0  # ticks since anything has changed

    def tick(
        self,
        newest_epoch: int,
        address: CoordinatorAddress | None,
        refused: bool,
        never_led: bool,
        turn: int,
    ) -> bool:
        """Whether to claim the next epoch now.

        `newest`: the newest claim. `refused`: nobody listens at `seen`. `fresh`: this attempt of
        the run has never had a coordinator. A process that has claimed and does not listen yet gets
        the whole timeout to do so.
        """
        sighting = (
            newest_epoch,
            address.epoch if address else -1,
            address.heartbeats if address else -1,
        )
        self._unchanged_ticks = self._unchanged_ticks + 1 if sighting == self._last_sighting else 0
        self._last_sighting = sighting
        dead = refused and address is not None and address.epoch == newest_epoch
        wait_ticks = 0 if dead or (never_led and turn == 0) else self._timeout_ticks
        return self._unchanged_ticks >= wait_ticks + turn * TURN_TICKS


class LeaderElection:
    """One agent's part in it. `lead(lease)` makes this process the coordinator."""

    moves = True

    def __init__(
        self,
        folder: RunFolder,
        node: str,
        key: bytes,
        rules: Policy,
        lead: Callable[[EpochLease], None],
    ):
        self._folder = folder
        self._node = node
        self._key = key
        self._rules = rules
        self._lead = lead
        self._preparing: asyncio.Task | None = None
        self._disk_error_logged = False  # that the run folder cannot be read or written

    def workers_started(self, order: Sequence[str]) -> None:
        """On the node that would lead next: imports, a little later, the modules that a coordinator
        plans with."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._prepare(order))

    async def _prepare(self, order: Sequence[str]) -> None:
        await asyncio.sleep(_PREPARE_S)
        address = read_address(self._folder)
        if address is not None and turn_of(self._node, order, address.node) == 0:
            await asyncio.to_thread(import_module, PLANNER)

    async def connect(self, epoch: int, order: Sequence[str], over: asyncio.Future) -> Channel:
        """A channel to the coordinator, wherever it is by now, possibly in this process. See
        `Connector`."""
        loop = asyncio.get_running_loop()
        timeout_s = max(2.0, self._rules.heartbeat_timeout_s)
        monitor = CoordinatorMonitor(round(timeout_s / TICK_S))
        end = loop.time() + max(self._rules.join_timeout_s, 4 * timeout_s)
        call: asyncio.Task[Channel] | None = (
            None  # a paused coordinator accepts the connection and never answers
        )
        called: CoordinatorAddress | None = None
        denied: CoordinatorAddress | None = None  # who first said that this node's key is wrong
        try:
            while loop.time() < end and not over.done():
                seen = read_address(self._folder)
                newest = self._try_on_disk(self._newest_claim)
                if call is None and seen is not None and seen.epoch == newest:
                    call = asyncio.create_task(self._connect_to(seen))
                    called = seen
                await asyncio.wait({over, call} if call else {over}, timeout=TICK_S)
                refused = wrong = False
                if call and call.done():
                    assert called is not None
                    try:
                        return call.result()
                    except WrongKey:
                        # said by anybody on the port of a coordinator that is gone, so not believed yet
                        if denied is not None and _heartbeats_continued(denied, called):
                            raise
                        call = None
                        wrong = True
                        denied = denied if _same_listener(denied, called) else called
                    except (OSError, Refused, TimeoutError) as error:
                        call = None
                        refused = isinstance(error, ConnectionRefusedError)
                state = self._try_on_disk(self._state)
                if state is None or newest is None:
                    continue  # whether it may claim is not known
                if state.is_final:
                    break
                fresh = seen is None and state.state == "pending" and newest <= state.epoch
                turn = turn_of(self._node, order, seen.node if seen else "")
                if monitor.tick(newest, seen, refused, fresh, turn):
                    with contextlib.suppress(LeaseLost):
                        if self._try_on_disk(
                            partial(self._claim, max(newest, state.epoch, epoch) + 1)
                        ):
                            _cancel(call)
                            call = None
                if refused or wrong:
                    await asyncio.wait({over}, timeout=TICK_S)
        finally:
            _cancel(call)
        state = self._try_on_disk(self._state)
        if state and state.is_final:  # this agent was paused or cut off, or came too late
            raise NoCoordinator(Exit.FENCED, f"the run has ended meanwhile: {state.state}")
        raise NoCoordinator(Exit.CAPACITY, "no coordinator, and none could be made")

    def _state(self) -> RunState:
        return read_state(self._folder)

    def _newest_claim(self) -> int:
        return EpochLease(self._folder, self._node).newest

    def _claim(self, epoch: int) -> bool:
        lease = EpochLease(self._folder, self._node)
        lease.take(epoch)
        self._lead(lease)
        return True

    def _try_on_disk(self, operation: Callable[[], Record]) -> Record | None:
        """What `record` returns, None where the disk does not let it: later."""
        try:
            return operation()
        except RECORD_ERRORS as error:
            if not self._disk_error_logged:
                log.error("no election while the run folder cannot be read or written: %s", error)
            self._disk_error_logged = True
            return None

    async def _connect_to(self, address: CoordinatorAddress) -> Channel:
        arguments = self._folder.run_id, self._node, self._key, FromCoordinator
        return await asyncio.wait_for(connect(address.host, address.port, *arguments), _CONNECT_S)


def _same_listener(first: CoordinatorAddress | None, second: CoordinatorAddress) -> bool:
    return first is not None and (first.host, first.port, first.epoch) == (
        second.host,
        second.port,
        second.epoch,
    )


def _heartbeats_continued(first: CoordinatorAddress, later: CoordinatorAddress) -> bool:
    """Whether the coordinator lived on after it was first called, so that it was the one who
    answered."""
    return (
        _same_listener(first, later) and later.heartbeats >= first.heartbeats + _BELIEVED_HEARTBEATS
    )


def _cancel(call: asyncio.Task | None) -> None:
    if call is not None and not call.done():
        call.cancel()
