"""A progress bar for a terminal, and reports rate_limited out for everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from trainer.data.build import Progress

_BAR_WIDTH = 32


def bar(stream: TextIO) -> Progress:
    """Draws one line that is rewritten in place; silent where `stream` is not a terminal."""
    if not stream.isatty():
        return lambda *_: None

    def draw(phase: str, done: int, total: int) -> None:
        if phase == "wait":
            stream.write("\r\x1b[Kdata: another process is tokenising")
        else:
            share = done / total if total else 1.0
            filled = "━" * int(share * _BAR_WIDTH)
            stream.write(f"\r\x1b[Kdata: {phase:<8} {filled:<{_BAR_WIDTH}} {share:4.0%} of {total / 1e6:,.1f} MB")
            if phase == "tokenise" and done >= total:
                stream.write("\n")
        stream.flush()

    return rate_limited(draw, 0.1)


def rate_limited(progress: Progress, every_s: float, clock: Callable[[], float] = time.monotonic) -> Progress:
    """At most one call in `every_s` seconds, but the first and the last of every phase always."""
    last_phase, last_time = "", 0.0

    def call(phase: str, done: int, total: int) -> None:
        nonlocal last_phase, last_time
        finished = phase != "wait" and done >= total
        if phase != last_phase or finished or clock() - last_time >= every_s:
            last_phase, last_time = phase, clock()
            progress(phase, done, total)

    return call
