"""Termination signals: one sets a flag; the loop then saves at a step that all ranks agree on and
exits with 75."""

from __future__ import annotations

import signal
from types import FrameType

#: SIGTERM: cancel, preemption, Kubernetes. SIGUSR1: Slurm's `--signal` before the time limit.
#: SIGINT: Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class TerminationSignal:
    """Keeps the name of the first termination signal in `received`, which the loop reads at step
    boundaries."""

    def __init__(self) -> None:
        self.received: str | None = None

    def install(self) -> TerminationSignal:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # sent by schedulers; the default kills
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
