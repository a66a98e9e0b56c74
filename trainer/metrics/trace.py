"""Writes the first steps of a run as a timeline: pipeline actions, phases, transfers and memory.

There is one file per rank, in Chrome's trace format, which Perfetto and chrome://tracing show;
`orch report` draws its memory. The rows are the pipeline's actions, the host's phases, the
transfers of each axis, and memory by category.

A transfer starts when it is launched. It ends when its data has arrived, if that is known: on CUDA
from events on the stream that waits for it; on gloo only an all-reduce reports it, and of other
transfers only the end of the wait is known (`"end": "waited for"`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from trainer.comm.timers import PhaseTimer
from trainer.durable import write_atomic
from trainer.pipeline.action_times import ActionTimes

from .memory import Point, downsample

#: About how many memory points per step the file has.
MOST_POINTS = 1000
#: Rows of the timeline.
ACTIONS = 0
PHASES = 1
STEPS = 2

Mark = Any  # seconds of perf_counter, or a CUDA event


@dataclass(slots=True)
class Transfer:
    name: str
    axis: str
    size: int  # bytes that this rank sends
    start: Mark
    end: Mark = None
    measured: bool = False  # `end` is when the data arrived, not when a wait for it ended

    def arrived(self, at: Mark, measured: bool) -> None:
        if self.end is None:
            self.end = at
            self.measured = measured


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
        """If the file cannot be written, `failed` is called with the error. `about` is stored in
        the file."""
        self.path = path
        self.rank = rank
        self.failed = failed
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
    def step(
        self,
        number: int,
        points: Callable[[], list[Point]],
        actions: ActionTimes,
        timer: PhaseTimer,
    ) -> Iterator[None]:
        """Records the block as step `number`; `points` returns its memory at the end. The file is
        also written if the step fails, to show which tensors filled the memory."""
        self._transfers = []
        timer.spans = []
        if self._cuda:
            torch.cuda.synchronize()
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        self._origin_s = perf_counter()
        self._zero = self._origin_s if self._zero is None else self._zero
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the step's own error matters more
                self._end(number, points, actions, timer)
            raise
        self._end(number, points, actions, timer)

    # -------------------------------------------------------------------------------------------
    #     transfers

    def transfer(self, name: str, axis: str, size: int, ranks: Sequence[int]) -> None:
        """Records that a transfer starts now."""
        self._sent = Transfer(name, axis, size, self._now())
        self._transfers.append(self._sent)

    def receive(self, axis: str, size: int, ranks: Sequence[int]) -> None:
        """Draws nothing: the sender's file has the transfer."""

    def on_arrival(self, work: dist.Work | None) -> Callable[[], None]:
        """Returns the function to call after a wait for the latest transfer."""
        transfer = self._sent
        self._sent = None
        if transfer is None:
            return lambda: None
        if work is not None and not self._cuda and transfer.name.startswith("all-reduce"):
            work.get_future().add_done_callback(lambda _: transfer.arrived(perf_counter(), True))
        return lambda: transfer.arrived(self._now(), self._cuda)

    # -------------------------------------------------------------------------------------------
    #     the file

    def _now(self) -> Mark:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _at(self, mark: Mark) -> float:
        """Returns a mark in seconds of perf_counter."""
        return self._origin_s + self._origin.elapsed_time(mark) / 1e3 if self._cuda else mark

    def _end(
        self,
        number: int,
        points: Callable[[], list[Point]],
        actions: ActionTimes,
        timer: PhaseTimer,
    ) -> None:
        if self._cuda:
            torch.cuda.synchronize()  # its events are read now; only traced steps pay for this
        spans = timer.spans
        timer.spans = None
        self._span(
            STEPS,
            f"step {number}",
            self._origin_s,
            perf_counter(),
            {},
        )
        for (kind, stage, micro_batch), start, end in actions.step.spans():
            action = {"stage": stage, "micro_batch": micro_batch}
            began = actions.step.began
            self._span(
                ACTIONS,
                kind.name,
                began + start,
                began + end,
                action,
            )
        for name, start, end in spans or []:
            self._span(PHASES, name, start, end, {})
        for number, transfer in enumerate(self._transfers):
            self._transfer(len(self._events) + number, transfer)
        for at, held in downsample(points(), MOST_POINTS):
            self._event(
                "C",
                "memory",
                max(at, self._origin_s),
                0,
                args=held,
            )
        try:
            write_trace(self.path, self._events, self.about)
        except OSError as error:
            self.failed(error)

    def _transfer(self, number: int, transfer: Transfer) -> None:
        identity = {"cat": transfer.axis, "id": number}
        args = {"bytes": transfer.size}
        self._event(
            "b",
            transfer.name,
            self._at(transfer.start),
            0,
            **identity,
            args=args,
        )
        if transfer.end is not None:
            end_source = "measured" if transfer.measured else "waited for"
            self._event(
                "e",
                transfer.name,
                self._at(transfer.end),
                0,
                **identity,
                args={"end": end_source},
            )

    def _span(
        self,
        row: int,
        name: str,
        start: float,
        end: float,
        args: dict[str, Any],
    ) -> None:
        self._event(
            "X",
            name,
            start,
            row,
            dur=_microseconds(end - start),
            args=args,
        )

    def _event(
        self,
        phase: str,
        name: str,
        at: float,
        row: int,
        **fields: Any,
    ) -> None:
        start = _microseconds(at - (self._zero or 0.0))
        self._events.append(
            {
                "ph": phase,
                "name": name,
                "pid": self.rank,
                "tid": row,
                "ts": start,
                **fields,
            }
        )


def write_trace(path: Path, events: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Writes the file atomically, readable by its owner only."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(
        path,
        msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}),
    )
    path.chmod(0o600)


def _named(kind: str, rank: int, row: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": rank,
        "tid": row,
        "args": {"name": name},
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
