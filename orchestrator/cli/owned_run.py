"""What signals do to `orch run`: its run is its own, and ends with it, as torchrun's workers end
with torchrun."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING

from orchestrator.errors import Interrupted, OrchError

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.state import RunState

#: Seconds within which a second Ctrl-C ends the run; without one, orch leaves the run running and
#: exits. A CI service that stops a job with SIGINT sends SIGTERM within this time.
_SECOND_SIGNAL_S = 10.0


class OwnedRun:
    """A run that ends with the command that watches it: SIGTERM, SIGHUP or a second Ctrl-C ends it,
    and one more signal kills it. `state` handles the signals, so that none interrupts a line of
    output."""

    def __init__(self, handle: str, folder: RunFolder, backend: Backend):
        self._handle = handle
        self._folder = folder
        self._backend = backend
        self._pending_signals: list[int] = []
        self._leave_at: float | None = None
        self.ended_by = 0  # the signal that ends the run

    def record_signal(self, signum: int) -> None:
        self._pending_signals.append(signum)

    def state(self, folder: RunFolder) -> RunState:
        """Handles the signals received so far, and returns the state of the run. Raises Interrupted
        when no second Ctrl-C followed the first in time."""
        while self._pending_signals:
            self._handle_signal(self._pending_signals.pop(0))
        if self._leave_at is not None and not self.ended_by and time.monotonic() > self._leave_at:
            raise Interrupted(signal.SIGINT)
        return self._backend.state(folder)

    def _handle_signal(self, signum: int) -> None:
        if signum == signal.SIGINT and self._leave_at is None and not self.ended_by:
            self._leave_at = time.monotonic() + _SECOND_SIGNAL_S
            _say(
                f"press Ctrl-C again within {_SECOND_SIGNAL_S:g} s to end the run; otherwise orch"
                " exits and the run continues"
            )
            return
        force = bool(self.ended_by)
        self.ended_by = self.ended_by or signum
        name = signal.Signals(signum).name
        if force:
            _say(f"{name}: killing run {self._handle}")
        else:
            _say(f"{name}: ending run {self._handle}; its workers save")
        try:
            self._backend.cancel(self._folder, force)
        except OrchError as error:  # the run has ended by itself, or the next state has the reason
            _say(error.message)


def _say(message: str) -> None:
    print(f"orch: {message}", file=sys.stderr, flush=True)
