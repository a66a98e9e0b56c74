"""Lets peers that hold the run's key in, and bounds what all others can cost.

Anybody who reaches the port may connect. A peer with the key proves it within one round trip; so a
connection that has not is bounded in time, in number and in bytes, and a new one is never turned
away for those that are there: the oldest of the address that has the most makes room. A refused
connection is kept open for a second, without being read, so that a stranger who tries again and
again does so once a second. What is noted about strangers is bounded as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from .channel import Channel, Refused, WrongKey, accept

# connections that wait in the kernel; asyncio's 100 make a peer wait for a second when it is full
BACKLOG = 1024
MAX_STRANGERS = 256  # connections without the key
_HOLD_S = 1.0
_WRITE_EVERY_S = 60.0
_MAX_REASON_CHARS = 300  # characters


class RefusalLog:
    """Notes refused connections: of each kind the first at once, then at most one line a minute,
    with a count.

    `note(peer, reason, count)` writes it: the newest refusal, and how many there were since the
    last line.
    """

    def __init__(
        self, write: Callable[[str, str, int], None], clock: Callable[[], float] = time.monotonic
    ):
        self._write = write
        self._clock = clock
        self._written_at: dict[str, float] = {}  # kind -> when its last line was written
        self._unwritten: dict[str, tuple[str, str, int]] = {}  # kind -> peer, reason, count

    def refused(self, kind: str, peer: str, reason: str) -> None:
        """`kind`: what is counted together; only names from peers that hold the key, so that there
        are few."""
        count = self._unwritten[kind][2] if kind in self._unwritten else 0
        self._unwritten[kind] = (peer, reason[:_MAX_REASON_CHARS], count + 1)
        self.flush()

    def flush(self, everything: bool = False) -> None:
        """Writes what is due. To be called from time to time, and with `everything` at the end."""
        now = self._clock()
        for kind, refusal in list(self._unwritten.items()):
            if everything or now - self._written_at.get(kind, -_WRITE_EVERY_S) >= _WRITE_EVERY_S:
                self._written_at[kind] = now
                del self._unwritten[kind]
                self._write(*refusal)


class Admission:
    """The greeting of all connections to one port. `message_type`: the messages of peers; `log`: gets
    the refusals."""

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
        self._strangers: dict[
            asyncio.StreamWriter, str
        ] = {}  # in the greeting, oldest first -> address
        self._refused: dict[asyncio.StreamWriter, asyncio.TimerHandle] = {}  # still open

    async def admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Channel | None:
        """The channel of a peer that holds the key; None for any other, whose connection will be
        closed."""
        peer = writer.get_extra_info("peername")
        self._make_room()
        self._strangers[writer] = str(peer[0]) if peer else ""
        try:
            return await accept(reader, writer, self._run, self._key, self._receives)
        except (Refused, OSError) as error:
            made_room = writer not in self._strangers
            reason = (
                "too many connections that have not proven themselves" if made_room else str(error)
            )
            self._log.refused(
                "wrong key" if isinstance(error, WrongKey) else "stranger", str(peer), reason
            )
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
                ((address, _),) = Counter(self._strangers.values()).most_common(1)
                oldest = next(
                    writer
                    for writer, stranger_address in self._strangers.items()
                    if stranger_address == address
                )
                del self._strangers[oldest]
                oldest.transport.abort()  # `accept` ends

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
        """Closes what was refused, and writes what was not said yet. Tasks in `admit` are the
        caller's to cancel."""
        for writer in list(self._refused):
            self._release(writer)
        self._log.flush(everything=True)
