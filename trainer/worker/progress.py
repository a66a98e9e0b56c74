"""Progress reports: a thread of each worker reports twice a second what the training loop does.

The thread only reads values that the loop keeps anyway, so the loop pays nothing. A loop that hangs
is still reported, with the operation in which it hangs; a process that is stopped, or whose
interpreter is blocked, sends no report. The coordinator finds the rank at fault
(`orchestrator.agent.faults.diagnosis`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .reporter import Reporter

EVERY_S = 0.5


@dataclass(frozen=True)
class Progress:
    """The progress of a worker. `step` is the step in progress, 0 before the first; `moves` grows
    with every advance."""

    step: int
    phase: str
    waiting: str | None  # the collective that it waits in
    moves: int


def starting() -> Progress:
    return Progress(step=0, phase="start", waiting=None, moves=0)


class ProgressReporter:
    """Reports `source()` every `every_s` seconds until `stop`, from a daemon thread."""

    def __init__(self, reporter: Reporter, every_s: float = EVERY_S):
        self.source: Callable[[], Progress] = starting
        self._reporter = reporter
        self._every_s = every_s
        self._stopped = threading.Event()

    def start(self) -> ProgressReporter:
        if self._reporter.fd is not None:
            threading.Thread(target=self._run, name="progress", daemon=True).start()
        return self

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while True:
            now = self.source()
            self._reporter.progress(
                step=now.step,
                phase=now.phase,
                waiting=now.waiting,
                moves=now.moves,
            )
            if self._stopped.wait(self._every_s):
                return
