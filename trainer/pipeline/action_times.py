"""Measured times of one rank's pipeline actions in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from orchestrator.plan.schedules import Action, Kind, Span


class StepActions:
    """The start and end of each compute action of one step: seconds of perf_counter, or CUDA
    events."""

    def __init__(self, cuda: bool):
        self._cuda = cuda
        self.began = perf_counter()
        self._origin: Any = now(cuda)
        self._marks: list[tuple[Action, Any, Any]] = []

    def begin(self, action: Action) -> int:
        """Records the start of an action. Returns its number, for `end`. Two actions that run as
        one both begin before either ends."""
        self._marks.append((action, now(self._cuda), None))
        return len(self._marks) - 1

    def end(self, number: int) -> None:
        """Records the end of an action."""
        action, start, _ = self._marks[number]
        self._marks[number] = action, start, now(self._cuda)

    def order(self) -> list[Action]:
        """Returns the actions in order of execution."""
        return [action for action, _, _ in self._marks]

    def spans(self) -> list[Span]:
        """Returns the actions' spans in seconds since the start of the step, in order of execution.
        On CUDA the step must have ended on the device."""
        if not self._cuda:
            return [
                Span(action, start - self.began, end - self.began)
                for action, start, end in self._marks
            ]
        seconds = self._origin.elapsed_time
        return [
            Span(action, seconds(start) / 1e3, seconds(end) / 1e3)
            for action, start, end in self._marks
        ]

    def seconds_by_pass(self) -> dict[str, float]:
        """Returns the seconds in "forward" and "backward"."""
        seconds = {"forward": 0.0, "backward": 0.0}
        for span in self.spans():
            name = "forward" if span.action.kind is Kind.F else "backward"
            seconds[name] += span.end - span.start
        return seconds

    def idle_seconds(self) -> float:
        """Returns the seconds between this rank's first start and last end in which no action
        runs."""
        spans = sorted(self.spans(), key=lambda span: span.start)
        if not spans:
            return 0.0
        idle = 0.0
        latest = spans[0].start
        for _, start, end in spans:  # two actions that run as one overlap
            idle += max(0.0, start - latest)
            latest = max(latest, end)
        return idle


class ActionTimes:
    """Times the compute actions of each step. On CUDA it records events, which do not block the
    host, and only while `measuring`."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.measuring = True
        self.step = StepActions(False)
        self._running: Action | None = None
        self._done = 0

    def restart(self) -> None:
        """Begins a step."""
        self.step = StepActions(self._cuda and self.measuring)
        self._done = 0

    @contextlib.contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        """Context manager around an action."""
        measured = self.measuring or not self._cuda
        step = self.step
        number = step.begin(action) if measured else 0
        self._running = action
        yield
        self._running = None
        self._done += 1
        if measured:
            step.end(number)

    def running(self) -> tuple[int, bool] | None:
        """Returns (number of the running action, whether it is a forward); None between actions."""
        return None if self._running is None else (self._done, self._running.kind is Kind.F)


def now(cuda: bool) -> Any:
    """Returns seconds of perf_counter, or a new CUDA event on the current stream."""
    if not cuda:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
