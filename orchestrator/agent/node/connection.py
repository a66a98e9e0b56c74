"""How an agent finds the coordinator and connects to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from orchestrator.agent.protocol.channel import Channel, Refused, WrongKey, connect
from orchestrator.agent.protocol.messages import FromCoordinator
from orchestrator.plan import Exit
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.document import Frozen
from orchestrator.run.folder import RunFolder

_POLL_S = 0.05


class CoordinatorAddress(Frozen, omit_defaults=True):
    """`coordinator.json`. The last three are written in elastic runs only."""

    host: str
    port: int
    node: str = ""
    epoch: int = -1  # the newest that it has claimed
    heartbeats: int = msgspec.field(default=0, name="beat")


def read_address(folder: RunFolder) -> CoordinatorAddress | None:
    try:
        return msgspec.json.decode(folder.coordinator.read_bytes(), type=CoordinatorAddress)
    except (OSError, *UNREADABLE):
        return None


class NoCoordinator(Exception):
    """No coordinator could be reached; the agent has to exit with `code`."""

    def __init__(self, code: Exit, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Connector(Protocol):
    """`moves`: when the coordinator is gone, another node may have a new one."""

    moves: bool

    async def connect(self, epoch: int, order: Sequence[str], over: asyncio.Future) -> Channel:
        """A channel to the coordinator. `epoch`: the newest that the agent has followed; `order`:
        the plan's nodes.

        Raises NoCoordinator, also when `over` is done, and WrongKey.
        """

    def workers_started(self, order: Sequence[str]) -> None:
        """To be called when the agent has started its workers."""


class FixedCoordinator:
    """The coordinator of a run with fixed nodes. It may start after the agents: they try until the
    join timeout."""

    moves = False

    def __init__(self, folder: RunFolder, node: str, key: bytes, join_timeout_s: float):
        self._folder = folder
        self._node = node
        self._key = key
        self._join_timeout_s = join_timeout_s

    async def connect(self, epoch: int, order: Sequence[str], over: asyncio.Future) -> Channel:
        deadline = time.monotonic() + self._join_timeout_s
        problem = "it has not said where it listens"
        while not over.done():
            try:
                address = msgspec.json.decode(
                    self._folder.coordinator.read_bytes(), type=CoordinatorAddress
                )
                arguments = self._folder.run_id, self._node, self._key, FromCoordinator
                return await connect(address.host, address.port, *arguments)
            except WrongKey:
                raise
            except FileNotFoundError:  # not yet
                pass
            except (OSError, Refused, *UNREADABLE) as error:
                problem = str(error)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        raise NoCoordinator(Exit.CAPACITY, f"no coordinator: {problem}")

    def workers_started(self, order: Sequence[str]) -> None:
        pass
