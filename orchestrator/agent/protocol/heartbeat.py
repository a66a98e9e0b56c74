"""Whether this very process has run: one that was stopped or starved has nothing to say about the silence of others.

Heartbeats and silence are told by one's own ticks alone; no clock of another host is ever read. A tick that comes late
says that this process did not run, or its machine hardly does. Then a peer that was not heard may have spoken, or stand
still as well, so late ticks are not held against anybody; and one's own heartbeat is overdue.
"""

from __future__ import annotations

import asyncio

HEARTBEAT_S = 1.0
PAUSE_S = 2.0 * HEARTBEAT_S  # between two heartbeats
_LATE = 2.0  # times as long as a tick should take


class SelfStallDetector:
    """Of what is done once a heartbeat."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    def missed_s(self) -> float:
        """Seconds since the start, or since it was asked last, if that is a pause; else 0."""
        before, self._last = self._last, self._clock()
        return since if (since := self._last - before) > PAUSE_S else 0.0


class HeartbeatTimer:
    """The ticks of one loop, some to a heartbeat. Pure: it is told the time."""

    def __init__(self, tick_s: float, now: float):
        self._tick_s, self._sent = tick_s, now

    def tick(self, began: float, now: float) -> tuple[bool, bool]:
        """(a heartbeat is due, this tick came in time). `began`: when the loop went to sleep; its own work is no delay,
        or thousands of members would make every tick a late one."""
        in_time = now - began < _LATE * self._tick_s
        due = now - self._sent > (HEARTBEAT_S - self._tick_s / 2 if in_time else HEARTBEAT_S / 2)
        if due:
            self._sent = now
        return due, in_time


def timeout_ticks(silence_s: float, tick_s: float) -> int:
    """Ticks in time without a word, after which a peer is lost: at least two heartbeats.

    Half a heartbeat less than `silence_s`: who dies has, on average, been silent for that long already.
    """
    return round(max(2.0 * HEARTBEAT_S, silence_s - HEARTBEAT_S / 2) / tick_s)
