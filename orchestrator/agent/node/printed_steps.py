"""Steps of a program that does not report them, read from the lines that it prints
(`metrics.pattern`).

A look reads what the workers' logs have grown by, in a thread of its own, for their file system may
hang. So a step is seen up to half a second late, and steps between two looks share the time between
them. Of a program that prints every tenth step the others are added, without a loss.

Some patterns take exponential time on some lines, and the agent has other things to do: a search
that takes longer than `_MAX_CPU_S` is cut off, and the pattern is not used any more.
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

_AT_ONCE = 1 << 18  # bytes of a log in one look; of more the last, for the newest steps
_LONGEST_LINE = 2000  # characters that are searched
_MAX_ADDED = 1000  # steps between two that were printed
_MAX_CPU_S = (
    0.5  # of this process, for what one log has grown by; a plain pattern takes a twentieth
)
_ORCH_PREFIX = "--- orch:"  # the beginning of a line that an agent writes into a log


@dataclass
class _Log:
    path: Path
    offset: int
    seen_at: float  # Unix seconds: when the worker was started, then when `step` was seen
    step: int | None = None
    incomplete_line: bytes = b""


class PrintedSteps:
    """`on_step(report)`: one step of a worker of this node. `pattern`: with a group `step`, others
    as in `PRINTED`."""

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
        self._read_lock = asyncio.Lock()  # of who reads on from where the last one has stopped
        self._epoch = -1
        self._logs: dict[int, _Log] = {}
        self.given_up = False

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._logs.clear()

    def follow(self, rank: int, path: Path, start: int) -> None:
        """Reads what a worker prints from here on. `start`: bytes that its log has from before."""
        if self.given_up:
            return
        self._logs[rank] = _Log(path, start, self._clock())

    def watch(self) -> None:
        """To be called every half second: looks, unless the last look has not ended."""
        if self._look_task and self._look_task.done():
            self._look_task.result()  # a bug: let it be seen
            self._look_task = None
        if not self._look_task:
            self._look_task = asyncio.create_task(self.look())

    def close(self) -> None:
        if self._look_task:
            self._look_task.cancel()

    async def look(self) -> None:
        for rank in list(self._logs):
            await self._read(rank, at_end=False)

    async def on_worker_exit(self, rank: int) -> None:
        """A worker has ended: what it printed last, also without the end of the line."""
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
            if self._logs.get(rank) is not log:  # of another epoch by now
                return
            if start != offset:
                log.incomplete_line = b""
            log.offset = start + len(new_bytes)
            farewells = self._read_steps(rank, log, new_bytes, at_end)
            for path, lines in farewells.items():
                await self._disk.run(partial(append, path, lines), None)

    def _read_steps(self, rank: int, log: _Log, new_bytes: bytes, at_end: bool) -> dict[Path, str]:
        """Reports the steps in what a log has grown by. What is to be said in the logs then."""
        lines = re.split(
            rb"[\r\n]", log.incomplete_line + new_bytes
        )  # progress bars end their lines with a carriage return
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
        """Every log is to say that no more steps are read."""
        self.given_up = True
        farewell = (
            f"{_ORCH_PREFIX} metrics.pattern took over {_MAX_CPU_S:g} s on what was printed, and reads no"
            " more steps\n"
        )
        farewells = {log.path: farewell for log in self._logs.values()}
        self._logs.clear()
        return farewells

    def _parse_line(self, line: bytes) -> dict[str, float] | None:
        """The numbers of a line by group; None for one that tells no step."""
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

    def _report_steps(self, rank: int, log: _Log, printed_steps: list[dict[str, float]]) -> None:
        """Reports the steps of one look. One that is not after the last, as of an evaluation, is
        left out."""
        now = self._clock()
        previous_step = log.step
        values_by_step: dict[int, dict[str, float]] = {}
        for values in printed_steps:
            step = int(values["step"])
            if step > max(values_by_step, default=-1 if previous_step is None else previous_step):
                values_by_step[step] = values
        if not values_by_step:
            return
        last_step = max(values_by_step)
        first_step = min(values_by_step) - 1 if previous_step is None else previous_step
        step_s = max(0.0, now - log.seen_at) / (last_step - first_step)
        reports: list[StepReport] = []
        tokens = 0
        for step in range(last_step, max(first_step, last_step - _MAX_ADDED), -1):
            tokens = (
                int(values_by_step[step].get("tokens", 0)) if step in values_by_step else tokens
            )  # as of the next that was printed
            reports.append(self._report(rank, step, step_s, tokens, values_by_step.get(step, {})))
        for report in reversed(reports):
            self._on_step(report)
        log.step = last_step
        log.seen_at = now

    def _report(
        self, rank: int, step: int, step_s: float, tokens: int, values: dict[str, float]
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
    """What a log has after `offset`, or the last of it: (where that begins, bytes)."""
    with path.open("rb") as file:
        start = max(offset, os.fstat(file.fileno()).st_size - _AT_ONCE)
        file.seek(start)
        return start, file.read(_AT_ONCE)


class _TooSlow(Exception):
    pass


@contextlib.contextmanager
def _cpu_limit(cpu_s: float) -> Iterator[None]:
    """_TooSlow in the body when it has taken so much processor time. Of the main thread: `re`
    looks for signals while it searches, so it is the one that can be cut off."""

    def stop(*_: object) -> None:
        raise _TooSlow

    previous_handler = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous_handler)
