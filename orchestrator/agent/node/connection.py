"""Finds the coordinator and connects an agent to it."""

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
    epoch: int = -1  # the newest epoch that it holds the lease on
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
    """Finds an agent's coordinator. `moves`: the coordinator may move to another node."""

    moves: bool

    async def connect(
        self,
        epoch: int,
        order: Sequence[str],
        ended: asyncio.Future,
    ) -> Channel:
        """Connects to the coordinator.

        `epoch` is the newest epoch that the agent has followed, `order` the plan's nodes. Raises
        NoCoordinator, also when `ended` is done, and WrongKey.
        """

    def workers_started(self, order: Sequence[str]) -> None:
        """Handles the start of the node's workers."""


class FixedCoordinator:
    """Connects to the coordinator of a run with fixed nodes.

    It may start after the agents, which retry until the join timeout.
    """

    moves = False

    def __init__(self, folder: RunFolder, node: str, key: bytes, join_timeout_s: float):
        self._folder = folder
        self._node = node
        self._key = key
        self._join_timeout_s = join_timeout_s

    async def connect(
        self,
        epoch: int,
        order: Sequence[str],
        ended: asyncio.Future,
    ) -> Channel:
        deadline = time.monotonic() + self._join_timeout_s
        problem = "it has not announced its address"
        while not ended.done():
            try:
                document = self._folder.coordinator.read_bytes()
                address = msgspec.json.decode(document, type=CoordinatorAddress)
                return await connect(
                    address.host,
                    address.port,
                    run=self._folder.run_id,
                    node=self._node,
                    key=self._key,
                    message_type=FromCoordinator,
                )
            except WrongKey:
                raise
            except FileNotFoundError:  # the coordinator has not started yet
                pass
            except (OSError, Refused, *UNREADABLE) as error:
                problem = str(error)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        raise NoCoordinator(Exit.CAPACITY, f"no coordinator: {problem}")

    def workers_started(self, order: Sequence[str]) -> None:
        pass
