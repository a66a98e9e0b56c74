"""Heartbeats, and the detection that this process itself was paused, so that peers are not declared
dead for it.

Heartbeats and silence are measured in a process's own ticks; no clock of another host is read. A
tick that comes late means that this process was paused, or that its machine hardly runs. A silent
peer may then have sent something, or be paused as well, so late ticks are not counted; and this
process's own heartbeat is overdue.
"""

from __future__ import annotations

import asyncio

HEARTBEAT_S = 1.0
PAUSE_S = 2.0 * HEARTBEAT_S  # between two heartbeats
_LATE = 2.0  # times as long as a tick should take


class SelfStallDetector:
    """Detects pauses of something that runs once a heartbeat."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    def missed_s(self) -> float:
        """Seconds since the start or the last call, if that is a pause; else 0."""
        previous = self._last
        self._last = self._clock()
        return elapsed_s if (elapsed_s := self._last - previous) > PAUSE_S else 0.0


class HeartbeatTimer:
    """The ticks of one loop, several to a heartbeat. Pure: it is told the time."""

    def __init__(self, tick_s: float, now: float):
        self._tick_s = tick_s
        self._sent = now

    def tick(self, began: float, now: float) -> tuple[bool, bool]:
        """(a heartbeat is due, this tick is in time). `began`: when the loop went to sleep, so that
        its own work, for thousands of members, does not make ticks late."""
        in_time = now - began < _LATE * self._tick_s
        due = now - self._sent > (HEARTBEAT_S - self._tick_s / 2 if in_time else HEARTBEAT_S / 2)
        if due:
            self._sent = now
        return due, in_time


def timeout_ticks(silence_s: float, tick_s: float) -> int:
    """Ticks without a message after which a peer is lost: at least two heartbeats.

    Half a heartbeat less than `silence_s`, since a peer that dies has been silent for that long on
    average.
    """
    return round(max(2.0 * HEARTBEAT_S, silence_s - HEARTBEAT_S / 2) / tick_s)
