"""Reads logs while they are written."""

from __future__ import annotations

from pathlib import Path

from orchestrator.plan.codec import open_regular

_AT_ONCE = 1 << 20  # bytes


class LogTail:
    """The lines of one log that were not read yet. Bytes that are no UTF-8 are shown escaped, never refused."""

    def __init__(self, path: Path, last_lines: int | None = None):
        self._path = path
        self._part = b""
        self._at = _start_of_last(path, last_lines)

    def read(self, last: bool = False) -> list[str]:
        """Whole lines since the last call; with `last` also a line that has no end yet."""
        lines: list[bytes] = []
        try:
            with open_regular(self._path) as file:
                file.seek(self._at)
                while chunk := file.read(_AT_ONCE):
                    self._at += len(chunk)
                    *whole, self._part = (self._part + chunk).split(b"\n")
                    lines += whole
        except OSError:  # its worker has not started yet
            pass
        if last and self._part:
            lines.append(self._part)
            self._part = b""
        return [line.removesuffix(b"\r").decode(errors="backslashreplace") for line in lines]


def _start_of_last(path: Path, count: int | None) -> int:
    """Byte at which the last `count` lines begin; None: the start of the file."""
    if count is None:
        return 0
    try:
        with open_regular(path) as file:
            end = file.seek(0, 2)
            at, block, breaks = end, b"", 0
            while at > 0 and breaks <= count:
                size = min(1 << 16, at)
                at -= size
                file.seek(at)
                block = file.read(size) + block
                breaks = block.removesuffix(b"\n").count(b"\n") + 1
    except OSError:
        return 0
    lines = block.splitlines(keepends=True)
    return end - sum(map(len, lines[-count:])) if count else end
