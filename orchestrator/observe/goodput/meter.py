"""Counts one node's wall time by state while the run is active, for its Prometheus counters.

A node knows only the epochs of its own agent and the steps of its first worker, so this is simpler
than `account`, which reads the whole run afterwards. A second is pending until its state is known
and counted after that, so counters only grow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from .account import HANG_FACTOR, HANG_S
from .intervals import STATES, WallState

_USUAL_OF = 32  # last steps
_LONGEST_RENDEZVOUS_S = 30.0  # beyond that the node is waiting: as a spare, or for other nodes


class WallMeter:
    """Counts seconds by state from the events of a node, whose times are monotonic seconds.

    Calls `spent(state, seconds)` for each stretch that is counted. `seconds` has the sums; with the
    pending time they add up to the time since construction.
    """

    def __init__(
        self,
        now: float,
        spent: Callable[[WallState, float], None] = lambda state, seconds: None,
    ):
        self._spent = spent
        self.seconds: dict[WallState, float] = dict.fromkeys(STATES, 0.0)
        self._since = self._entered = now
        self._state: WallState = "rendezvous"
        self._furthest = 0
        self._usual: deque[float] = deque(maxlen=_USUAL_OF)
        self._broken: float | None = None  # when the last stop was seen, until a step follows

    @property
    def ettr(self) -> float | None:
        """The effective training time ratio so far; None before the first step, which some programs
        never report."""
        total = sum(self.seconds.values())
        return self.seconds["productive"] / total if total > 0 and self._furthest else None

    def enter(self, state: WallState, now: float) -> None:
        """Starts `state`. Only steps start `hang`, the state between two steps: a step that ends
        turns its time into productive or replayed time."""
        if self._state == "hang" and state == "rendezvous":
            self._broken = now if self._broken is None else self._broken
            broken_step_s = min(now - self._since, self._typical or 0.0)
            self._spend("replay", broken_step_s)
        self._rest(now)
        self._state = state
        self._entered = now

    def step(
        self,
        number: int,
        step_s: float,
        stall_s: float,
        now: float,
    ) -> float | None:
        """Counts a reported step. Returns the seconds since the last stop if this is the first step
        after it, else None."""
        span = max(0.0, now - self._since)
        typical = self._typical
        if self._state == "hang":  # steps follow each other
            stall = min(max(stall_s, 0.0), span)
            self._spend("checkpoint_stall", stall)
            work = span - stall
        else:
            work = min(max(step_s, 0.0), span)
        if typical is not None and work > HANG_FACTOR * typical + HANG_S:
            work = min(work, typical)
        self._rest(now - work)
        self._spend("productive" if number > self._furthest else "replay", now - self._since)
        self._furthest = max(self._furthest, number)
        self._usual.append(step_s)
        self._state = "hang"
        broken = self._broken
        self._broken = None
        return None if broken is None else max(0.0, now - step_s - broken)

    def look(self, now: float) -> None:
        """Counts the time whose state is known by now: all time in a state without steps, and the
        hung part of a step that does not end."""
        if self._state != "hang":
            self._rest(now)
            return
        typical = self._typical
        if typical is not None and now - self._since > HANG_FACTOR * typical + HANG_S:
            self._spend("hang", now - self._since - typical)

    @property
    def _typical(self) -> float | None:
        return statistics.median(self._usual) if len(self._usual) >= 3 else None

    def _rest(self, until: float) -> None:
        """Counts the time up to `until` as spent in the current state."""
        if self._state == "rendezvous":
            rendezvous_end = min(until, self._entered + _LONGEST_RENDEZVOUS_S)
            self._spend("rendezvous", rendezvous_end - self._since)
            self._spend("waiting", until - self._since)
        self._spend(self._state, until - self._since)

    def _spend(self, state: WallState, seconds: float) -> None:
        if seconds > 0:
            self.seconds[state] += seconds
            self._since += seconds
            self._spent(state, seconds)
