"""A worker's heartbeat: what it does now, twice a second, from a thread of its own.

The thread only looks at what the training loop has written down for other reasons, so the loop pays nothing for it.
A loop that no longer moves still has a pulse, which says where it stands; a process that is stopped, or whose
interpreter is held by something that never returns, has none. Who is to blame is the coordinator's to find
(`orchestrator.agent.faults.diagnosis`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .reporter import Reporter

EVERY_S = 0.5


@dataclass(frozen=True)
class Doing:
    """Where a worker is. `step`: the one that it makes, 0 before the first; `moves`: grows whenever it gets on."""

    step: int
    phase: str
    waiting: str | None  # the exchange with others that it stands still in
    moves: int


def starting() -> Doing:
    return Doing(step=0, phase="start", waiting=None, moves=0)


class Pulse:
    """Sends `source()` until `stop`. The thread is a daemon: nothing waits for it."""

    def __init__(self, reporter: Reporter, every_s: float = EVERY_S):
        self.source: Callable[[], Doing] = starting
        self._reporter, self._every_s = reporter, every_s
        self._over = threading.Event()

    def start(self) -> Pulse:
        if self._reporter.fd is not None:
            threading.Thread(target=self._run, name="pulse", daemon=True).start()
        return self

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while True:
            doing = self.source()
            self._reporter.pulse(step=doing.step, phase=doing.phase, waiting=doing.waiting, moves=doing.moves)
            if self._over.wait(self._every_s):
                return
