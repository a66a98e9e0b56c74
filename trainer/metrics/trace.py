"""The first steps of a run as a timeline: what ran when, which transfers were under way, what memory was held.

One file a rank, in Chrome's trace format, which Perfetto and chrome://tracing show; `orch report` draws its memory.
Rows: the pipeline's actions, the host's phases, one for the transfers of each axis, and memory by category.

A transfer begins when it is launched. It ends when its data is here as far as that can be known: on CUDA from events on
the stream that waits for it; on gloo an all-reduce tells itself, of all else it is only known when somebody waited
(`"end": "waited for"`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from trainer.comm.timers import PhaseTimer
from trainer.durable import write_atomic
from trainer.pipeline.action_times import Trace

from .memory import Point, thin

#: Changes of memory that a step's timeline keeps: peaks and valleys of so many slices of its time.
MOST_POINTS = 1000
ACTIONS, PHASES, STEPS = 0, 1, 2  # rows

Mark = Any  # seconds of perf_counter, or a CUDA event


@dataclass(slots=True)
class Transfer:
    name: str
    axis: str
    size: int  # bytes that this rank sends
    start: Mark
    end: Mark = None
    measured: bool = False  # `end` is when the data was here, not when somebody had waited for it

    def arrived(self, at: Mark, measured: bool) -> None:
        if self.end is None:
            self.end, self.measured = at, measured


class StepTrace:
    """Records steps into `path`. Give it to `CommCounter.trace` while it records."""

    def __init__(
        self,
        path: Path,
        rank: int,
        device: torch.device,
        failed: Callable[[OSError], None],
        about: Mapping[str, Any] = {},
    ):
        """`failed` is told why the file could not be written; `about` goes into it."""
        self.path, self.rank, self.failed = path, rank, failed
        self.about = {"rank": rank, "device": device.type, **about}
        self._cuda = device.type == "cuda"
        self._events: list[dict[str, Any]] = [
            _named("process_name", rank, 0, f"rank {rank}"),
            _named("thread_name", rank, ACTIONS, "pipeline actions"),
            _named("thread_name", rank, PHASES, "phases on the host"),
            _named("thread_name", rank, STEPS, "steps"),
        ]
        self._zero: float | None = None  # perf_counter where the file's time begins
        self._transfers: list[Transfer] = []
        self._sent: Transfer | None = None

    @contextlib.contextmanager
    def step(self, number: int, points: Callable[[], list[Point]], actions: Trace, timer: PhaseTimer) -> Iterator[None]:
        """Everything inside belongs to step `number`. `points`: its memory, asked at its end. Written then, also when
        the step fails: one that ran out of memory is worth a look."""
        self._transfers, timer.spans = [], []
        if self._cuda:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._origin_s = perf_counter()
        self._zero = self._origin_s if self._zero is None else self._zero
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the step's own failure is the one to tell
                self._end(number, points, actions, timer)
            raise
        self._end(number, points, actions, timer)

    # ------------------------------------------------------------------------------------------- transfers

    def transfer(self, name: str, axis: str, size: int) -> None:
        """A transfer starts now."""
        self._sent = Transfer(name, axis, size, self._now())
        self._transfers.append(self._sent)

    def under_way(self, work: dist.Work | None) -> Callable[[], None]:
        """What to call when somebody has waited for the transfer that started last."""
        transfer, self._sent = self._sent, None
        if transfer is None:
            return lambda: None
        if work is not None and not self._cuda and transfer.name.startswith("all-reduce"):
            work.get_future().add_done_callback(lambda _: transfer.arrived(perf_counter(), True))
        return lambda: transfer.arrived(self._now(), self._cuda)

    # ------------------------------------------------------------------------------------------- the file

    def _now(self) -> Mark:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, mark: Mark) -> float:
        """Seconds of perf_counter."""
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3 if self._cuda else mark

    def _end(self, number: int, points: Callable[[], list[Point]], actions: Trace, timer: PhaseTimer) -> None:
        spans, timer.spans = timer.spans, None
        self._span(STEPS, f"step {number}", self._origin_s, perf_counter(), {})
        for (kind, stage, micro_batch), start, end in actions.spans():
            more = {"stage": stage, "micro_batch": micro_batch}
            self._span(ACTIONS, kind.name, actions.began + start, actions.began + end, more)
        for name, start, end in spans:
            self._span(PHASES, name, start, end, {})
        for number, transfer in enumerate(self._transfers):
            self._transfer(len(self._events) + number, transfer)
        for at, held in thin(points(), MOST_POINTS):
            self._event("C", "memory", max(at, self._origin_s), 0, args=held)
        try:
            write_trace(self.path, self._events, self.about)
        except OSError as error:
            self.failed(error)

    def _transfer(self, number: int, transfer: Transfer) -> None:
        same = {"cat": transfer.axis, "id": number}
        args = {"bytes": transfer.size}
        self._event("b", transfer.name, self._at(transfer.start), 0, **same, args=args)
        if transfer.end is not None:
            how = "measured" if transfer.measured else "waited for"
            self._event("e", transfer.name, self._at(transfer.end), 0, **same, args={"end": how})

    def _span(self, row: int, name: str, start: float, end: float, args: dict[str, Any]) -> None:
        self._event("X", name, start, row, dur=_microseconds(end - start), args=args)

    def _event(self, phase: str, name: str, at: float, row: int, **more: Any) -> None:
        start = _microseconds(at - self._zero)
        self._events.append({"ph": phase, "name": name, "pid": self.rank, "tid": row, "ts": start, **more})


def write_trace(path: Path, events: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """A whole file, readable by its owner alone."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))
    path.chmod(0o600)


def _named(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
