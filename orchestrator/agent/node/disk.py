"""Files of the run folder, read and written beside the event loop: if their file system hangs, the
agent does not."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_TIMEOUT_S = 5.0  # for one piece of work; on a healthy disk it takes milliseconds

T = TypeVar("T")


def append(path: Path, lines: str) -> None:
    """Adds to a log what orch has to say there, if the disk takes it."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(lines)


class Disk:
    """A thread that does one piece of work after the other. What takes too long counts as not done;
    until it has ended after all, nothing else is begun."""

    def __init__(self, timeout_s: float = _TIMEOUT_S):
        self._timeout_s = timeout_s
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._late = 0  # pieces of work that nobody waits for any more

    @property
    def hangs(self) -> bool:
        return self._late > 0

    async def run(self, operation: Callable[[], T], default: T) -> T:
        """What `work()` returns; `otherwise` if it fails with an OSError, or hangs."""
        if self.hangs:
            return default
        if self._thread is None:  # a daemon: one that hangs keeps no process from its end
            self._thread = threading.Thread(target=self._serve, name="disk", daemon=True)
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
        future.exception()  # of no interest any more

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
