"""Reads the steps of a program that does not report them from the lines that it prints.

`metrics.pattern` matches these lines. Each look reads the new part of the workers' logs, in a
thread, since their file system may hang. So a step is seen up to half a second late, and steps
between two looks share the time between them. For a program that prints every tenth step, the
others are added without a loss.

Some patterns take exponential time on some lines, and the agent has other work: a search that takes
longer than `_MAX_CPU_S` is cut off, and the pattern is not used any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from orchestrator.plan.worker import StepReport

from .disk import Disk, append

_AT_ONCE = 1 << 18  # bytes of a log per look; of a longer part only the end is read
_LONGEST_LINE = 2000  # characters that are searched
_MAX_ADDED = 1000  # steps added between two printed ones
#: Seconds of processor time for the new part of one log; a plain pattern takes a twentieth.
_MAX_CPU_S = 0.5
_ORCH_PREFIX = "--- orch:"  # begins the lines that an agent writes into a log


@dataclass
class _Log:
    path: Path
    offset: int
    seen_at: float  # Unix seconds: the worker's start, then the time at which `step` was seen
    step: int | None = None
    incomplete_line: bytes = b""


class PrintedSteps:
    """Follows the logs of this node's workers and calls `on_step(report)` for each step.

    `pattern` has a group `step`, and others as in `PRINTED`.
    """

    def __init__(
        self,
        pattern: str,
        on_step: Callable[[StepReport], None],
        disk: Disk,
        clock: Callable[[], float] = time.time,
    ):
        self._pattern = re.compile(pattern)
        self._on_step = on_step
        self._clock = clock
        self._disk = disk
        self._look_task: asyncio.Task[None] | None = None
        self._read_lock = asyncio.Lock()  # held by the reader of a log's next part
        self._epoch = -1
        self._logs: dict[int, _Log] = {}
        self.given_up = False

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._logs.clear()

    def follow(self, rank: int, path: Path, start: int) -> None:
        """Follows the log of a worker from byte `start` on."""
        if self.given_up:
            return
        self._logs[rank] = _Log(path, start, self._clock())

    def watch(self) -> None:
        """Starts a look unless one is running; to be called every half second."""
        if self._look_task and self._look_task.done():
            self._look_task.result()  # raises the error of a bug
            self._look_task = None
        if not self._look_task:
            self._look_task = asyncio.create_task(self.look())

    def close(self) -> None:
        if self._look_task:
            self._look_task.cancel()

    async def look(self) -> None:
        """Reports the new steps of all workers."""
        for rank in list(self._logs):
            await self._read(rank, at_end=False)

    async def on_worker_exit(self, rank: int) -> None:
        """Reports the last steps of a worker, also from a line without its end."""
        await self._read(rank, at_end=True)

    async def _read(self, rank: int, at_end: bool) -> None:
        async with self._read_lock:
            log = self._logs.get(rank)
            if log is None:  # given up
                return
            offset = log.offset
            start, new_bytes = await self._disk.run(
                lambda: _read_new_bytes(log.path, offset), (offset, b"")
            )
            if self._logs.get(rank) is not log:  # a new epoch has begun meanwhile
                return
            if start != offset:
                log.incomplete_line = b""
            log.offset = start + len(new_bytes)
            farewells = self._read_steps(rank, log, new_bytes, at_end)
            for path, lines in farewells.items():
                await self._disk.run(partial(append, path, lines), None)

    def _read_steps(
        self,
        rank: int,
        log: _Log,
        new_bytes: bytes,
        at_end: bool,
    ) -> dict[Path, str]:
        """Reports the steps in the new part of a log; returns last lines for logs, if any."""
        # Progress bars end their lines with a carriage return.
        lines = re.split(rb"[\r\n]", log.incomplete_line + new_bytes)
        log.incomplete_line = b"" if at_end else lines.pop()[:_LONGEST_LINE]
        printed_steps: list[dict[str, float]] = []
        farewells: dict[Path, str] = {}
        try:
            with _cpu_limit(_MAX_CPU_S):
                printed_steps += filter(None, map(self._parse_line, lines))
        except _TooSlow:
            farewells = self._give_up()
        if printed_steps:
            self._report_steps(rank, log, printed_steps)
        return farewells

    def _give_up(self) -> dict[Path, str]:
        """Stops reading steps; returns the last line for each log, which says so."""
        self.given_up = True
        farewell = (
            f"{_ORCH_PREFIX} metrics.pattern took over {_MAX_CPU_S:g} s on the printed lines:"
            " no more steps are read\n"
        )
        farewells = {log.path: farewell for log in self._logs.values()}
        self._logs.clear()
        return farewells

    def _parse_line(self, line: bytes) -> dict[str, float] | None:
        """Returns the numbers of a line by group, or None if it does not show a step."""
        printed = line[:_LONGEST_LINE].decode(errors="replace")
        match = None if printed.startswith(_ORCH_PREFIX) else self._pattern.search(printed)
        if match is None:
            return None
        values = {}
        for name, digits in match.groupdict().items():
            with contextlib.suppress(ValueError):
                number = float((digits or "").replace(",", ""))  # as in 1,234,567
                if math.isfinite(number):
                    values[name] = number
        return values if values.get("step", -1) >= 0 else None

    def _report_steps(
        self,
        rank: int,
        log: _Log,
        printed_steps: list[dict[str, float]],
    ) -> None:
        """Reports the steps of one look, without those that are not after the last one.

        Such steps belong to something else, as an evaluation.
        """
        now = self._clock()
        last_step = -1 if log.step is None else log.step
        values_by_step: dict[int, dict[str, float]] = {}
        for values in printed_steps:
            step = int(values["step"])
            if step > last_step:
                values_by_step[step] = values
                last_step = step
        if not values_by_step:
            return
        previous_step = min(values_by_step) - 1 if log.step is None else log.step
        step_s = max(0.0, now - log.seen_at) / (last_step - previous_step)
        reports: list[StepReport] = []
        tokens = 0
        for step in range(last_step, max(previous_step, last_step - _MAX_ADDED), -1):
            values = values_by_step.get(step, {})
            if step in values_by_step:  # a step that was not printed has the tokens of the next one
                tokens = int(values.get("tokens", 0))
            reports.append(self._report(rank, step, step_s, tokens, values))
        for report in reversed(reports):
            self._on_step(report)
        log.step = last_step
        log.seen_at = now

    def _report(
        self,
        rank: int,
        step: int,
        step_s: float,
        tokens: int,
        values: dict[str, float],
    ) -> StepReport:
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


def _read_new_bytes(path: Path, offset: int) -> tuple[int, bytes]:
    """Reads a log from `offset` on, or its end if that is too much; returns (start, bytes)."""
    with path.open("rb") as file:
        start = max(offset, os.fstat(file.fileno()).st_size - _AT_ONCE)
        file.seek(start)
        return start, file.read(_AT_ONCE)


class _TooSlow(Exception):
    pass


@contextlib.contextmanager
def _cpu_limit(cpu_s: float) -> Iterator[None]:
    """Raises _TooSlow in the body when it has taken `cpu_s` of processor time.

    The body runs in the main thread: `re` looks for signals there while it searches.
    """

    def stop(*_: object) -> None:
        raise _TooSlow

    previous_handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)
