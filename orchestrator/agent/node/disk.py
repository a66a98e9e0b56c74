"""Reads and writes files of the run folder in a thread, so that a hung disk hangs no agent."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_TIMEOUT_S = 5.0  # for one operation; on a healthy disk it takes milliseconds

T = TypeVar("T")


def append(path: Path, lines: str) -> None:
    """Appends orch's own lines to a worker's log, if the disk allows it."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(lines)


class Disk:
    """A thread that runs one disk operation after the other.

    An operation that takes too long counts as failed; until it ends, no other one starts.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S):
        self._timeout_s = timeout_s
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._late = 0  # operations that timed out and are still running

    @property
    def hangs(self) -> bool:
        return self._late > 0

    async def run(self, operation: Callable[[], T], default: T) -> T:
        """Returns the result of `operation`, or `default` if it raises an OSError or hangs."""
        if self.hangs:
            return default
        if self._thread is None:  # a daemon, so that a hung one does not keep the process alive
            self._thread = threading.Thread(
                target=self._serve,
                name="disk",
                daemon=True,
            )
            self._thread.start()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._tasks.put((operation, future))
        finished, _ = await asyncio.wait([future], timeout=self._timeout_s)
        if not finished:
            self._late += 1
            future.add_done_callback(self._ended_late)
            return default
        with contextlib.suppress(OSError):
            return future.result()
        return default

    def close(self) -> None:
        self._tasks.put(None)

    def _ended_late(self, future: asyncio.Future[Any]) -> None:
        self._late -= 1
        future.exception()  # marks the error as retrieved

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            operation, future = task
            try:
                set_outcome = future.set_result
                outcome = operation()
            except Exception as error:
                set_outcome = future.set_exception
                outcome = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                future.get_loop().call_soon_threadsafe(set_outcome, outcome)
