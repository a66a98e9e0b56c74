"""Admits peers that hold the run's key, and limits the cost of all others.

Anybody who reaches the port may connect. A peer with the key proves it within one round trip, so
connections without the proof are limited in time, in number and in bytes. A new connection is never
turned away because of older ones: the oldest connection of the address that has most of them is
closed. A refused connection is kept open for a second without being read, so that a stranger can
try only once per second. Log entries about strangers are limited as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from .channel import Channel, Refused, WrongKey, accept

#: Connections that may wait in the kernel. When asyncio's default of 100 is full, a peer waits a
#: second.
BACKLOG = 1024
MAX_STRANGERS = 256  # connections that have not proven the key
_HOLD_S = 1.0
_WRITE_EVERY_S = 60.0
_MAX_REASON_CHARS = 300  # characters


class RefusalLog:
    """Logs refused connections: the first of each kind at once, then one line per minute with a
    count.

    `write(peer, reason, count)` receives the newest refusal, and the number since the last line.
    """

    def __init__(
        self,
        write: Callable[[str, str, int], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._write = write
        self._clock = clock
        self._written_at: dict[str, float] = {}  # kind -> time of its last line
        self._unwritten: dict[str, tuple[str, str, int]] = {}  # kind -> (peer, reason, count)

    def refused(self, kind: str, peer: str, reason: str) -> None:
        """Adds a refusal. Refusals of one `kind` are counted together.

        A kind contains a name only if the peer holds the key, so that there are few kinds.
        """
        count = self._unwritten[kind][2] if kind in self._unwritten else 0
        self._unwritten[kind] = (peer, reason[:_MAX_REASON_CHARS], count + 1)
        self.flush()

    def flush(self, everything: bool = False) -> None:
        """Writes the lines that are due. To be called regularly, with `everything` at the end."""
        now = self._clock()
        for kind, refusal in list(self._unwritten.items()):
            if everything or now - self._written_at.get(kind, -_WRITE_EVERY_S) >= _WRITE_EVERY_S:
                self._written_at[kind] = now
                del self._unwritten[kind]
                self._write(*refusal)


class Admission:
    """Greets all connections to one port.

    Peers send `message_type`; `log` receives the refusals.
    """

    def __init__(
        self,
        run: str,
        key: bytes,
        message_type: Any,
        log: RefusalLog,
        max_strangers: int = MAX_STRANGERS,
    ):
        self._run = run
        self._key = key
        self._receives = message_type
        self._log = log
        self._max_strangers = max_strangers
        #: Connections in the greeting, oldest first -> their address.
        self._strangers: dict[asyncio.StreamWriter, str] = {}
        #: Refused connections that are still open.
        self._refused: dict[asyncio.StreamWriter, asyncio.TimerHandle] = {}

    async def admit(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> Channel | None:
        """Returns the channel of a peer that holds the key; None if the connection is refused."""
        peer = writer.get_extra_info("peername")
        self._make_room()
        self._strangers[writer] = str(peer[0]) if peer else ""
        try:
            return await accept(reader, writer, self._run, self._key, self._receives)
        except (Refused, OSError) as error:
            reason = str(error)
            if writer not in self._strangers:  # it was closed in favor of a newer connection
                reason = "too many connections that have not proven themselves"
            kind = "wrong key" if isinstance(error, WrongKey) else "stranger"
            self._log.refused(kind, str(peer), reason)
            self._hold(writer)
            return None
        except BaseException:  # the caller is cancelled
            writer.close()
            raise
        finally:
            self._strangers.pop(writer, None)

    def _make_room(self) -> None:
        while len(self._strangers) + len(self._refused) >= self._max_strangers:
            if self._refused:
                self._release(next(iter(self._refused)))
            else:
                ((busiest, _),) = Counter(self._strangers.values()).most_common(1)
                strangers = self._strangers.items()
                oldest = next(writer for writer, address in strangers if address == busiest)
                del self._strangers[oldest]
                oldest.transport.abort()  # ends its `accept`

    def _hold(self, writer: asyncio.StreamWriter) -> None:
        if writer.is_closing():
            return
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # typed as a transport that only writes
        self._refused[writer] = asyncio.get_running_loop().call_later(
            _HOLD_S, self._release, writer
        )

    def _release(self, writer: asyncio.StreamWriter) -> None:
        self._refused.pop(writer).cancel()
        writer.transport.abort()

    def close(self) -> None:
        """Closes refused connections and writes the remaining lines.

        The caller cancels the tasks in `admit`.
        """
        for writer in list(self._refused):
            self._release(writer)
        self._log.flush(everything=True)
