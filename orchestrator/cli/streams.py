"""Standard streams that end no command: one that is closed is the null device, and what a full disk
does not take of the output is left out and remembered.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


class _Forgiving(io.FileIO):
    """A descriptor whose writes do not fail, but for a pipe without a reader. `lost`: the first
    that would have."""

    lost: OSError | None = None

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self.fileno() == 1:
                raise
            self.lost = self.lost or error
            return memoryview(content).nbytes


def open_standard_streams() -> None:
    """For the three of this process, where nobody has replaced them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _forgiving(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _forgiving(2, sys.stderr)
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a terminal that cannot show a character must not end a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _forgiving(number: int, before: TextIO | None) -> TextIO:
    """The text stream of a descriptor, with the encoding and the buffering of the one before."""
    wrapped = before if isinstance(before, io.TextIOWrapper) else None
    lines = wrapped.line_buffering if wrapped else number == 2
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(number, "w", closefd=False)),
        encoding=wrapped.encoding if wrapped else "utf-8",
        line_buffering=lines,
        write_through=bool(wrapped and wrapped.write_through),
    )


def lost_output() -> str:
    """Why something of standard output is lost, "" where all of it was taken."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    lost = raw.lost if isinstance(raw, _Forgiving) else None
    return f"standard output cannot be written: {lost.strerror}" if lost else ""


def announce(announcement: str, out: TextIO) -> None:
    """Says what must not be lost, a run that was started: on standard error where `out` does not
    take it."""
    with contextlib.suppress(BrokenPipeError):
        print(announcement, file=out, flush=True)
        if out is not sys.stdout or not lost_output():
            return
    print(f"orch: started {announcement}", file=sys.stderr)
