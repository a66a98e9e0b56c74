"""Standard streams whose failures end no command: a closed stream becomes the null device, and
output that a full disk does not take is dropped and recorded."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


class _LenientFile(io.FileIO):
    """A descriptor whose writes fail only when standard output is a pipe without a reader."""

    lost: OSError | None = None  # the first error that a write has ignored

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and self.fileno() == 1:
                raise
            self.lost = self.lost or error
            return memoryview(content).nbytes


def open_standard_streams() -> None:
    """Makes the three standard streams of this process lenient, unless a caller has replaced
    them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lenient_stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lenient_stream(2, sys.stderr)
    # A terminal that cannot show a character must not end a run.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _lenient_stream(number: int, replaced: TextIO | None) -> TextIO:
    """Returns a text stream of a descriptor, with the encoding and the buffering of the stream that
    it replaces."""
    wrapped = replaced if isinstance(replaced, io.TextIOWrapper) else None
    line_buffering = bool(wrapped and wrapped.line_buffering)
    return io.TextIOWrapper(
        io.BufferedWriter(_LenientFile(number, "w", closefd=False)),
        encoding=wrapped.encoding if wrapped else "utf-8",
        # Under PYTHONUNBUFFERED the replaced standard error has none: nothing below it keeps lines.
        line_buffering=line_buffering or number == 2,
        write_through=bool(wrapped and wrapped.write_through),
    )


def lost_output() -> str:
    """Returns the reason why standard output is incomplete, or "" if all of it was written."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    lost = raw.lost if isinstance(raw, _LenientFile) else None
    return f"standard output cannot be written: {lost.strerror}" if lost else ""


def announce(announcement: str, out: TextIO) -> None:
    """Prints the handle of a run that was started, which must not be lost: on standard error if
    `out` does not take it."""
    with contextlib.suppress(BrokenPipeError):
        print(announcement, file=out, flush=True)
        if out is not sys.stdout or not lost_output():
            return
    print(f"orch: started {announcement}", file=sys.stderr)
