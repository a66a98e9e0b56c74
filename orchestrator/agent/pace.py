"""Whether this very process has run: one that was stopped or starved has nothing to say about the silence of others."""

from __future__ import annotations

import asyncio

HEARTBEAT_S = 1.0
PAUSE_S = 2.0 * HEARTBEAT_S  # between two ticks


class Pace:
    """Of a loop that ticks once a heartbeat."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self.start()

    def start(self) -> None:
        """What has taken its time until now was this loop's own work."""
        self._last = self._clock()

    def missed_s(self) -> float:
        """Seconds since the start, or since it was asked last, if that is a pause; else 0."""
        before, self._last = self._last, self._clock()
        return since if (since := self._last - before) > PAUSE_S else 0.0
