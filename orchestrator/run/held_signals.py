"""Signals that would end this process wait while it does what must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from orchestrator.errors import Interrupted

#: Those by which a terminal, `timeout` or a scheduler asks a command to end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HeldSignals:
    """A context in which `ENDING` are noted. They take effect at its end, or earlier in `check` and
    `deliver`; where an exception ends it, they are forgotten. One that is ignored (nohup) stays
    ignored. Contexts nest. Outside the main thread, where Python hears no signals, nothing is held.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._came: list[int] = []
        self._deliver: Callable[[int], None] | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in ENDING:
                handler = signal.getsignal(signum)
                if handler not in (signal.SIG_IGN, None):
                    self._before[signum] = handler
                    signal.signal(signum, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._came and kind is None:
            signal.raise_signal(self._came[0])

    def check(self) -> None:
        """Interrupted when a signal has come."""
        if self._came:
            raise Interrupted(self._came[0])

    def deliver(self, hear: Callable[[int], None] | None) -> None:
        """From now on `hear` is called with each signal, with those that have come first; None:
        they wait again."""
        self._deliver = hear
        while hear and self._came:
            hear(self._came.pop(0))

    def _hear(self, signum: int, _: FrameType | None) -> None:
        if self._deliver:
            self._deliver(signum)
        else:
            self._came.append(signum)


def interrupt(signum: int) -> None:
    """What a signal does to a command that only watches. Interrupted."""
    raise Interrupted(signum)
