"""Reads logs while they are written."""

from __future__ import annotations

from pathlib import Path

from orchestrator.plan.codec import open_regular

_AT_ONCE = 1 << 20  # bytes


class LogTail:
    """The lines of one log that were not read yet. Bytes that are no UTF-8 are shown escaped, never
    refused."""

    def __init__(self, path: Path, last_lines: int | None = None):
        self._path = path
        self._part: list[bytes] = []  # of a line that has no end yet, however long
        self._at = _start_of_last(path, last_lines)

    def read(self, last: bool = False) -> list[str]:
        """Whole lines since the last call; with `last` also a line that has no end yet."""
        lines: list[bytes] = []
        try:
            with open_regular(self._path) as file:
                file.seek(self._at)
                while chunk := file.read(_AT_ONCE):
                    self._at += len(chunk)
                    first, *following = chunk.split(b"\n")
                    self._part.append(first)
                    if following:
                        lines += [b"".join(self._part), *following[:-1]]
                        self._part = [following[-1]]
        except OSError:  # its worker has not started yet
            pass
        if last and (unfinished := b"".join(self._part)):
            lines.append(unfinished)
            self._part = []
        return [line.removesuffix(b"\r").decode(errors="backslashreplace") for line in lines]


def _start_of_last(path: Path, count: int | None) -> int:
    """Byte at which the last `count` lines begin; None: the start of the file."""
    if count is None:
        return 0
    try:
        with open_regular(path) as file:
            position = end = file.seek(0, 2)
            file.seek(max(end - 1, 0))
            breaks = count + (
                file.read(1) == b"\n"
            )  # that many from the end is the one before those lines
            while position > 0 and count:
                size = min(1 << 16, position)
                position -= size
                file.seek(position)
                block = file.read(size)
                if (block_breaks := block.count(b"\n")) >= breaks:
                    for _ in range(breaks):
                        size = block.rindex(b"\n", 0, size)
                    return position + size + 1
                breaks -= block_breaks
            return position
    except OSError:
        return 0
