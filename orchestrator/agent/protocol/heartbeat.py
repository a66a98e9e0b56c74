"""Heartbeats, and the detection of pauses of this process.

Heartbeats and silence are measured in a process's own ticks; no clock of another host is read. A
late tick means that this process was paused, or that its machine is overloaded. A silent peer may
then have sent something, or be paused as well, so late ticks do not count against peers; and this
process's own heartbeat is overdue.
"""

from __future__ import annotations

import asyncio

HEARTBEAT_S = 1.0
PAUSE_S = 2.0 * HEARTBEAT_S  # between two heartbeats: longer is a pause
_LATE = 2.0  # a tick that takes this many times its length is late


class SelfStallDetector:
    """Detects pauses of a task that runs once per heartbeat."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    def missed_s(self) -> float:
        """Returns the seconds since the start or the last call if they are a pause, else 0."""
        previous = self._last
        self._last = self._clock()
        elapsed_s = self._last - previous
        return elapsed_s if elapsed_s > PAUSE_S else 0.0


class HeartbeatTimer:
    """Counts the ticks of one loop, several per heartbeat. Pure: callers pass the time."""

    def __init__(self, tick_s: float, now: float):
        self._tick_s = tick_s
        self._sent = now

    def tick(self, began: float, now: float) -> tuple[bool, bool]:
        """Returns whether a heartbeat is due, and whether this tick is in time.

        `began` is when the loop went to sleep, so that the loop's own work, for thousands of
        members, does not make ticks late.
        """
        in_time = now - began < _LATE * self._tick_s
        interval_s = HEARTBEAT_S - self._tick_s / 2 if in_time else HEARTBEAT_S / 2
        due = now - self._sent > interval_s
        if due:
            self._sent = now
        return due, in_time


def timeout_ticks(silence_s: float, tick_s: float) -> int:
    """Returns the ticks without a message after which a peer is lost: at least two heartbeats.

    It is half a heartbeat less than `silence_s`, since the last message of a peer that dies is that
    old on average.
    """
    return round(max(2.0 * HEARTBEAT_S, silence_s - HEARTBEAT_S / 2) / tick_s)
