"""Reads the reports of workers: one JSON object per line of a pipe.

No line is trusted, and reading never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import msgspec

from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.worker import Report

LONGEST_LINE = 1 << 16  # bytes
_AT_ONCE = 1 << 18  # bytes read before other tasks get their turn

_decoder = msgspec.json.Decoder(Report)


class ReportPipe:
    """Splits the bytes of one worker's pipe into lines. Lines that are too long are dropped."""

    def __init__(self, fd: int, on_line: Callable[[bytes], None]):
        self._fd = fd
        self._on_line = on_line
        self._incomplete_line = bytearray()
        self._too_long = False
        self._open = True
        asyncio.get_running_loop().add_reader(fd, self.read)

    def read(self, at_most: int = _AT_ONCE) -> None:
        """Reads the available bytes, up to `at_most`."""
        if not self._open:
            return
        remaining = at_most
        while remaining > 0:
            try:
                chunk = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                chunk = b""
            if not chunk:
                # the worker, and all processes that inherited the pipe, have closed it
                self.close()
                return
            remaining -= len(chunk)
            self.feed(chunk)

    def feed(self, chunk: bytes) -> None:
        *lines, incomplete_line = chunk.split(b"\n")
        for line in lines:
            complete_line = bytes(self._incomplete_line) + line
            self._incomplete_line.clear()
            if self._too_long or len(complete_line) > LONGEST_LINE:
                self._on_line(b"")  # counts as unreadable
            elif complete_line:
                self._on_line(complete_line)
            self._too_long = False
        if len(self._incomplete_line) + len(incomplete_line) > LONGEST_LINE:
            self._too_long = True
            self._incomplete_line.clear()
        elif not self._too_long:
            self._incomplete_line += incomplete_line

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)


def parse(line: bytes, rank: int, epoch: int) -> Report | None:
    """Returns the report in a line, or None if it is not one, or not of this rank and epoch."""
    try:
        report = _decoder.decode(line)
    except UNREADABLE:
        return None
    return report if report.rank == rank and report.epoch == epoch else None


class JsonLines:
    """A file that grows by whole lines. A disk that fails loses lines, which are counted."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path
        self._fd = -1
        self.lost = 0
        with contextlib.suppress(OSError):  # `write` tries again
            self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)

    def write(self, line: bytes) -> None:
        try:
            if self._fd < 0:
                self._open()
            written = os.write(self._fd, line + b"\n")
            if written != len(line) + 1:
                os.write(self._fd, b"\n")  # a truncated line must not swallow the next one
                self.lost += 1
        except OSError:
            self.lost += 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def stamped(line: bytes, at: float) -> bytes:
    """Returns a JSON object with the agent's time as first field: `{"at":1700000000.123, ...}`."""
    return b'{"at":%.3f,' % at + line.lstrip()[1:]
