"""Notices to stop: a signal sets a flag, all ranks agree on the step, the state is saved, the worker ends with 75."""

from __future__ import annotations

import signal
from types import FrameType

#: SIGTERM: cancel, preemption, Kubernetes. SIGUSR1: Slurm's `--signal` before the time limit. SIGINT: Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Notice:
    """Remembers the first signal. Handlers only set a flag: the loop reads it at a step boundary."""

    def __init__(self) -> None:
        self.received: str | None = None

    def listen(self) -> Notice:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # schedulers send it to every process of a step; default: death
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
