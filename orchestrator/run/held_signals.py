"""Holds back signals that would end this process while it does work that must not be left
unfinished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from orchestrator.errors import Interrupted

#: The signals by which a terminal, `timeout` or a scheduler asks a command to end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HeldSignals:
    """A context that records the signals of `ENDING` instead of obeying them.

    They take effect at its end, or earlier in `check` and `deliver`; if an exception ends the
    context, they are dropped. A signal that is ignored (nohup) stays ignored. Contexts nest.
    Outside the main thread, where Python handles no signals, nothing is held.
    """

    def __init__(self) -> None:
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._pending: list[int] = []
        self._deliver: Callable[[int], None] | None = None

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in ENDING:
                handler = signal.getsignal(signum)
                if handler not in (signal.SIG_IGN, None):
                    self._previous_handlers[signum] = handler
                    signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        if self._pending and kind is None:
            signal.raise_signal(self._pending[0])

    def check(self) -> None:
        """Raises Interrupted if a signal has arrived."""
        if self._pending:
            raise Interrupted(self._pending[0])

    def deliver(self, handle: Callable[[int], None] | None) -> None:
        """Calls `handle` with each signal from now on, first with those that have already
        arrived. None: signals are held back again."""
        self._deliver = handle
        while handle and self._pending:
            handle(self._pending.pop(0))

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self._deliver:
            self._deliver(signum)
        else:
            self._pending.append(signum)


def interrupt(signum: int) -> None:
    """Raises Interrupted: what a signal does to a command that only watches."""
    raise Interrupted(signum)
