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

#: For the second Ctrl-C, which ends the run, before the first one leaves it to itself. A CI service
#: that stops a job with SIGINT sends SIGTERM within this time.
_SECOND_S = 10.0


class OwnedRun:
    """A run that is watched: SIGTERM, SIGHUP and the second Ctrl-C end it, another signal then
    kills it. Signals are obeyed at the next look at the run's state, never in the middle of a line.
    """

    def __init__(self, handle: str, folder: RunFolder, backend: Backend):
        self._handle = handle
        self._folder = folder
        self._backend = backend
        self._came: list[int] = []
        self._leave_at: float | None = None
        self.ended_by = 0  # the signal that ends the run

    def hear(self, signum: int) -> None:
        self._came.append(signum)

    def state(self, folder: RunFolder) -> RunState:
        """The run's, after what signals ask. Interrupted where only one Ctrl-C came."""
        while self._came:
            self._obey(self._came.pop(0))
        if self._leave_at is not None and not self.ended_by and time.monotonic() > self._leave_at:
            raise Interrupted(signal.SIGINT)
        return self._backend.state(folder)

    def _obey(self, signum: int) -> None:
        if signum == signal.SIGINT and self._leave_at is None and not self.ended_by:
            self._leave_at = time.monotonic() + _SECOND_S
            _say(
                f"Ctrl-C once more within {_SECOND_S:g} s ends the run; else this leaves it, and it"
                " goes on"
            )
            return
        force = bool(self.ended_by)
        self.ended_by = self.ended_by or signum
        name = signal.Signals(signum).name
        _say(
            f"{name}: {'killing' if force else 'ending'} run"
            f" {self._handle}{'' if force else '; its workers save'}"
        )
        try:
            self._backend.cancel(self._folder, force)
        except OrchError as error:  # it has ended by itself, or its next look says what it is
            _say(error.message)


def _say(message: str) -> None:
    print(f"orch: {message}", file=sys.stderr, flush=True)
