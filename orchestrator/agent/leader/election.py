"""Leader election: how an agent of an elastic run finds its coordinator, or becomes it.

There is no vote. The coordinator is the process that holds the lease on the newest epoch in the run
folder (`run.epoch_lease`); while it runs, it counts its heartbeats in `coordinator.json`. An agent
that has lost it polls that file. If nobody listens at that address any more, or the heartbeat count
has not changed for too long, the agent takes the lease on the next epoch: the first node in the
plan's order at once, each later one after a further delay, so that one takes it and the others find
it. If two try, the file system lets one of them create the lease file; a coordinator that was only
paused finds the newer lease before it writes. Agents count their own ticks and read no clock of
another host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
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

#: The module that a coordinator plans with; its import takes half a second of processor time.
PLANNER = "orchestrator.planner.elastic.replan"
TICK_S = 0.25
TURN_TICKS = 4  # delay between the attempts of two successive nodes
_CONNECT_S = 5.0
#: Heartbeats after which a coordinator that says "wrong key" is known to be alive, and believed.
_BELIEVED_HEARTBEATS = 3
_PREPARE_S = 5.0  # delay after the workers' start, which needs the processor first

log = logging.getLogger("orch.agent")
Record = TypeVar("Record")


def turn_of(node: str, order: Sequence[str], lost_node: str) -> int:
    """Returns the turn of `node` to succeed `lost_node`: 0 for the first of the others.

    Nodes without ranks come last.
    """
    successors = [candidate for candidate in order if candidate != lost_node]
    return successors.index(node) if node in successors else len(successors)


class Announcement:
    """Writes `coordinator.json`: the coordinator's address and, in elastic runs, its heartbeats."""

    def __init__(self, folder: RunFolder, state_writer: StateWriter, node: str):
        self._folder = folder
        self._state_writer = state_writer
        self._node = node
        self._address: CoordinatorAddress | None = None
        self.paused = False  # heartbeats stop, so that other nodes may take the lease

    def begin(self, host: str, port: int) -> None:
        self._address = CoordinatorAddress(host=host, port=port)
        if self._state_writer.leased_epoch < 0:
            write_private(self._folder.coordinator, msgspec.json.encode(self._address))
        else:
            self._address = msgspec.structs.replace(self._address, node=self._node)
            self.renew()

    def renew(self) -> None:
        """Writes the next heartbeat; to be called once per heartbeat and after taking a lease.

        Raises LeaseLost if another process holds a newer epoch.
        """
        if self._state_writer.leased_epoch < 0:
            self._state_writer.retry()
        elif self._address is not None and not self.paused:
            self._state_writer.rewrite_if_replaced()
            heartbeats = self._address.heartbeats + 1
            self._address = msgspec.structs.replace(
                self._address,
                epoch=self._state_writer.leased_epoch,
                heartbeats=heartbeats,
            )
            write_private(
                self._folder.coordinator,
                msgspec.json.encode(self._address),
                durable=False,
            )


class CoordinatorMonitor:
    """Decides, from what one agent sees at each tick, whether the coordinator is gone. Pure."""

    def __init__(self, timeout_ticks: int):
        self._timeout_ticks = timeout_ticks
        self._last_sighting: tuple[int, int, int] | None = None
        self._unchanged_ticks = 0  # since the last new lease or heartbeat

    def tick(
        self,
        newest_epoch: int,
        address: CoordinatorAddress | None,
        refused: bool,
        never_led: bool,
        turn: int,
    ) -> bool:
        """Returns whether this agent should take the lease on the next epoch now.

        `newest_epoch`: the newest epoch that is leased. `refused`: nobody listens at `address`.
        `never_led`: this attempt of the run has not had a coordinator. A process that holds the
        lease but does not listen yet gets the whole timeout.
        """
        sighting = (newest_epoch, -1, -1)
        if address:
            sighting = (newest_epoch, address.epoch, address.heartbeats)
        unchanged = sighting == self._last_sighting
        self._unchanged_ticks = self._unchanged_ticks + 1 if unchanged else 0
        self._last_sighting = sighting
        dead = refused and address is not None and address.epoch == newest_epoch
        wait_ticks = 0 if dead or (never_led and turn == 0) else self._timeout_ticks
        return self._unchanged_ticks >= wait_ticks + turn * TURN_TICKS


class LeaderElection:
    """One agent's part in the election. `lead(lease)` makes this process the coordinator."""

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
        self._disk_error_logged = False

    def workers_started(self, order: Sequence[str]) -> None:
        """Imports the planner on the node that would lead next, after the workers' start."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._prepare(order))

    async def _prepare(self, order: Sequence[str]) -> None:
        await asyncio.sleep(_PREPARE_S)
        address = read_address(self._folder)
        if address is not None and turn_of(self._node, order, address.node) == 0:
            await asyncio.to_thread(import_module, PLANNER)

    async def connect(
        self,
        epoch: int,
        order: Sequence[str],
        ended: asyncio.Future,
    ) -> Channel:
        """Connects to the coordinator, which may have moved, even here. See `Connector`."""
        loop = asyncio.get_running_loop()
        timeout_s = max(2.0, self._rules.heartbeat_timeout_s)
        monitor = CoordinatorMonitor(round(timeout_s / TICK_S))
        deadline = loop.time() + max(self._rules.join_timeout_s, 4 * timeout_s)
        attempt = _ConnectionAttempt(self._connect_to)
        try:
            while loop.time() < deadline and not ended.done():
                address = read_address(self._folder)
                newest = self._try_on_disk(self._newest_epoch)
                if address is not None and address.epoch == newest:
                    attempt.begin(address)
                channel = await attempt.wait(ended)
                if channel is not None:
                    return channel
                state = self._try_on_disk(self._state)
                if state is None or newest is None:
                    continue  # it is unknown whether this agent may lead
                if state.is_final:
                    break
                never_led = address is None and state.state == "pending" and newest <= state.epoch
                turn = turn_of(self._node, order, address.node if address else "")
                next_epoch = max(newest, state.epoch, epoch) + 1
                is_due = monitor.tick(newest, address, attempt.refused, never_led, turn)
                if is_due and self._take_lease(next_epoch):
                    attempt.cancel()
                if attempt.refused or attempt.wrong_key:
                    await asyncio.wait({ended}, timeout=TICK_S)
        finally:
            attempt.cancel()
        state = self._try_on_disk(self._state)
        if state and state.is_final:  # this agent was paused or cut off, or came too late
            raise NoCoordinator(Exit.FENCED, f"the run has ended meanwhile: {state.state}")
        raise NoCoordinator(Exit.CAPACITY, "no coordinator, and none could be made")

    def _state(self) -> RunState:
        return read_state(self._folder)

    def _newest_epoch(self) -> int:
        return EpochLease(self._folder, self._node).newest

    def _take_lease(self, epoch: int) -> bool:
        """Takes the lease on an epoch and becomes the coordinator. False if that fails."""
        with contextlib.suppress(LeaseLost):
            return bool(self._try_on_disk(partial(self._lead_epoch, epoch)))
        return False

    def _lead_epoch(self, epoch: int) -> bool:
        lease = EpochLease(self._folder, self._node)
        lease.take(epoch)
        self._lead(lease)
        return True

    def _try_on_disk(self, operation: Callable[[], Record]) -> Record | None:
        """Returns the result of `operation`, or None after a disk error; callers try again."""
        try:
            return operation()
        except RECORD_ERRORS as error:
            if not self._disk_error_logged:
                log.error("no election while the run folder cannot be read or written: %s", error)
            self._disk_error_logged = True
            return None

    async def _connect_to(self, address: CoordinatorAddress) -> Channel:
        connecting = connect(
            address.host,
            address.port,
            run=self._folder.run_id,
            node=self._node,
            key=self._key,
            message_type=FromCoordinator,
        )
        return await asyncio.wait_for(connecting, _CONNECT_S)


class _ConnectionAttempt:
    """Attempts to connect to a coordinator, one at a time.

    They run in the background, since a paused coordinator accepts a connection and never answers.
    `refused` and `wrong_key` are set if the attempt failed like that during the last `wait`.
    """

    def __init__(self, connect_to: Callable[[CoordinatorAddress], Coroutine[None, None, Channel]]):
        self._connect_to = connect_to
        self._task: asyncio.Task[Channel] | None = None
        self._address: CoordinatorAddress | None = None
        #: The coordinator that first said that this node's key is wrong.
        self._denied_by: CoordinatorAddress | None = None
        self.refused = False
        self.wrong_key = False

    def begin(self, address: CoordinatorAddress) -> None:
        """Starts an attempt, unless one is running."""
        if self._task is None:
            self._task = asyncio.create_task(self._connect_to(address))
            self._address = address

    async def wait(self, ended: asyncio.Future) -> Channel | None:
        """Waits for at most one tick; returns the channel if the attempt has succeeded.

        Raises WrongKey if a coordinator that is alive refuses this node's key.
        """
        self.refused = False
        self.wrong_key = False
        await asyncio.wait({ended, self._task} if self._task else {ended}, timeout=TICK_S)
        if self._task is None or not self._task.done():
            return None
        task = self._task
        address = self._address
        assert address is not None
        try:
            return task.result()
        except WrongKey:
            # Anybody on the port of a coordinator that is gone can say so: believed only later.
            if self._denied_by is not None and _heartbeats_continued(self._denied_by, address):
                raise
            self.wrong_key = True
            if not _same_listener(self._denied_by, address):
                self._denied_by = address
        except (OSError, Refused, TimeoutError) as error:
            self.refused = isinstance(error, ConnectionRefusedError)
        self._task = None
        return None

    def cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
        self._task = None


def _same_listener(first: CoordinatorAddress | None, second: CoordinatorAddress) -> bool:
    if first is None:
        return False
    return (first.host, first.port, first.epoch) == (second.host, second.port, second.epoch)


def _heartbeats_continued(first: CoordinatorAddress, later: CoordinatorAddress) -> bool:
    """Returns whether the coordinator continued its heartbeats after it first refused this node.

    If it did, the refusal came from the coordinator and not from a stranger on its old port.
    """
    return (
        _same_listener(first, later) and later.heartbeats >= first.heartbeats + _BELIEVED_HEARTBEATS
    )
