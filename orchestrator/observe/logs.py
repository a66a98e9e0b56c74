"""Reads logs while they are written."""

from __future__ import annotations

from pathlib import Path

from orchestrator.plan.codec import open_regular

_AT_ONCE = 1 << 20  # bytes


class LogTail:
    """Reads one log from where the last read ended. Bytes that are not UTF-8 are escaped, not
    refused."""

    def __init__(self, path: Path, last_lines: int | None = None):
        self._path = path
        self._unfinished: list[bytes] = []  # pieces of a line that has not ended yet
        self._offset = _start_of_last(path, last_lines)

    def read(self, last: bool = False) -> list[str]:
        """Returns the complete lines since the last call; with `last` also an unfinished line."""
        lines: list[bytes] = []
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                while chunk := file.read(_AT_ONCE):
                    self._offset += len(chunk)
                    first, *following = chunk.split(b"\n")
                    self._unfinished.append(first)
                    if following:
                        lines += [b"".join(self._unfinished), *following[:-1]]
                        self._unfinished = [following[-1]]
        except OSError:  # its worker has not started yet
            pass
        if last and (unfinished := b"".join(self._unfinished)):
            lines.append(unfinished)
            self._unfinished = []
        return [line.removesuffix(b"\r").decode(errors="backslashreplace") for line in lines]


def _start_of_last(path: Path, count: int | None) -> int:
    """The byte at which the last `count` lines begin; the start of the file if `count` is None."""
    if count is None:
        return 0
    try:
        with open_regular(path) as file:
            position = end = file.seek(0, 2)
            file.seek(max(end - 1, 0))
            # The line break before those lines, counted from the end of the file.
            breaks = count + (file.read(1) == b"\n")
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
