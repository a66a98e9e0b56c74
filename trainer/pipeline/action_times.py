"""Measured times of the pipeline actions of one rank in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from orchestrator.plan.schedules import Action, Kind, Span


class ActionTimes:
    """Start and end of each compute action of a step. On CUDA it records events and does not block the host."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.began = 0.0  # perf_counter at the start of the step
        self._marks: list[tuple[Action, Any, Any]] = []  # start, end: seconds of perf_counter or CUDA events
        self._origin: Any = None
        self._running: Action | None = None

    def restart(self) -> None:
        self._marks, self.began = [], perf_counter()
        self._origin = self._now() if self._cuda else None

    @contextlib.contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        start, self._running = self._now(), action
        yield
        self._running = None
        self._marks.append((action, start, self._now()))

    def running(self) -> tuple[int, bool] | None:
        """(number of the action that runs now, whether it is a forward); None between actions."""
        return None if self._running is None else (len(self._marks), self._running.kind is Kind.F)

    def order(self) -> list[Action]:
        return [action for action, _, _ in self._marks]

    def spans(self) -> list[Span]:
        """Seconds since the start of the step, in order of execution. On CUDA this waits for the device."""
        if not self._cuda:
            return [Span(action, start - self.began, end - self.began) for action, start, end in self._marks]
        torch.cuda.synchronize()
        seconds = self._origin.elapsed_time
        return [Span(action, seconds(start) / 1e3, seconds(end) / 1e3) for action, start, end in self._marks]

    def idle_seconds(self) -> float:
        """Between this rank's first start and last end, when it waits for other stages."""
        spans = self.spans()
        return spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans) if spans else 0.0

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
