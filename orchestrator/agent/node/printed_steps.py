"""Steps of a program that does not report them, read from the lines that it prints (`metrics.pattern`).

A look reads what the workers' logs have grown by, so a step is seen up to half a second late, and steps between two
looks share the time between them. Of a program that prints every tenth step the others are added, without a loss.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.plan.worker import StepReport

_AT_ONCE = 1 << 18  # bytes of a log in one look; of more the last, for the newest steps
_LONGEST_LINE = 2000  # characters that are searched
_MOST_ADDED = 1000  # steps between two that were printed
_OURS = "--- orch:"  # the beginning of a line that an agent writes into a log


@dataclass
class _Log:
    path: Path
    offset: int
    seen_at: float  # Unix seconds: when the worker was started, then when `step` was seen
    step: int | None = None
    part: bytes = b""


class PrintedSteps:
    """`on_step(report)`: one step of a worker of this node. `pattern`: with a group `step`, others as in `PRINTED`."""

    def __init__(self, pattern: str, on_step: Callable[[StepReport], None], clock: Callable[[], float] = time.time):
        self._pattern, self._on_step, self._clock = re.compile(pattern), on_step, clock
        self._epoch = -1
        self._logs: dict[int, _Log] = {}

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._logs.clear()

    def follow(self, rank: int, path: Path, start: int) -> None:
        """Reads what a worker prints from here on. `start`: bytes that its log has from before."""
        self._logs[rank] = _Log(path, start, self._clock())

    def look(self) -> None:
        """To be called every half second."""
        for rank in self._logs:
            self._read(rank, at_end=False)

    def ended(self, rank: int) -> None:
        """A worker has ended: what it printed last, also without the end of the line."""
        if rank in self._logs:
            self._read(rank, at_end=True)

    def _read(self, rank: int, at_end: bool) -> None:
        log = self._logs[rank]
        grown = b""
        with contextlib.suppress(OSError), log.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size - log.offset > _AT_ONCE:
                log.offset, log.part = size - _AT_ONCE, b""
            file.seek(log.offset)
            grown = file.read(_AT_ONCE)
            log.offset += len(grown)
        lines = re.split(rb"[\r\n]", log.part + grown)  # progress bars end their lines with a carriage return
        log.part = b"" if at_end else lines.pop()[:_LONGEST_LINE]
        found = [values for line in lines if (values := self._values(line))]
        if found:
            self._tell(rank, log, found)

    def _values(self, line: bytes) -> dict[str, float] | None:
        """The numbers of a line by group; None for one that tells no step."""
        text = line[:_LONGEST_LINE].decode(errors="replace")
        match = None if text.startswith(_OURS) else self._pattern.search(text)
        if match is None:
            return None
        values = {}
        for name, word in match.groupdict().items():
            with contextlib.suppress(ValueError):
                number = float((word or "").replace(",", ""))  # as in 1,234,567
                if math.isfinite(number):
                    values[name] = number
        return values if values.get("step", -1) >= 0 else None

    def _tell(self, rank: int, log: _Log, found: list[dict[str, float]]) -> None:
        """Reports the steps of one look. One that is not after the last, as of an evaluation, is left out."""
        now, first = self._clock(), log.step
        later: dict[int, dict[str, float]] = {}
        for values in found:
            step = int(values["step"])
            if step > max(later, default=-1 if first is None else first):
                later[step] = values
        if not later:
            return
        last = max(later)
        before = min(later) - 1 if first is None else first
        step_s = max(0.0, now - log.seen_at) / (last - before)
        reports: list[StepReport] = []
        tokens = 0
        for step in range(last, max(before, last - _MOST_ADDED), -1):
            tokens = int(later[step].get("tokens", 0)) if step in later else tokens  # as of the next that was printed
            reports.append(self._report(rank, step, step_s, tokens, later.get(step, {})))
        for report in reversed(reports):
            self._on_step(report)
        log.step, log.seen_at = last, now

    def _report(self, rank: int, step: int, step_s: float, tokens: int, values: dict[str, float]) -> StepReport:
        return StepReport(
            rank=rank,
            epoch=self._epoch,
            step=step,
            samples=int(values.get("samples", 0)),
            tokens=tokens,
            step_s=step_s,
            loss=values.get("loss"),
            grad_norm=values.get("grad_norm"),
            lr=values.get("lr"),
        )
