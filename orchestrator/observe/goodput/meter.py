"""Counts one node's wall time by state while it runs, for its Prometheus counters.

A node sees its own time only, so this is simpler than `account`, which reads the whole run
afterwards: it knows the epochs that its agent follows and the steps of its first worker. A second
is counted once it is known what it was, so counters only grow; until then it is pending.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from .account import HANG_FACTOR, HANG_S
from .intervals import STATES, WallState

_USUAL_OF = 32  # last steps
_LONGEST_RENDEZVOUS_S = 30.0  # beyond that this node is a spare, or others are missing: it waits


class WallMeter:
    """Feed it what happens, with monotonic seconds. What is counted, `spent(state, seconds)` hears
    at once; `seconds` has the sums, which together are the time from construction until now but for
    what is pending.
    """

    def __init__(
        self, now: float, spent: Callable[[WallState, float], None] = lambda state, seconds: None
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
        """None before the first step: a program may never report one."""
        total = sum(self.seconds.values())
        return self.seconds["productive"] / total if total > 0 and self._furthest else None

    def enter(self, state: WallState, now: float) -> None:
        """From now on. `hang` is entered by steps alone: while they follow each other, it is what
        none of them ends."""
        if self._state == "hang" and state == "rendezvous":
            self._broken = now if self._broken is None else self._broken
            self._spend(
                "replay", min(now - self._since, self._typical or 0.0)
            )  # the step that was broken off
        self._rest(now)
        self._state = state
        self._entered = now

    def step(self, number: int, step_s: float, stall_s: float, now: float) -> float | None:
        """A step was reported. Seconds since the stop before it, if it is the first one after a
        stop."""
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
        """Count what is known by now: all of a state without steps, and what a step that does not
        end has hung."""
        if self._state != "hang":
            self._rest(now)
        elif (
            typical := self._typical
        ) is not None and now - self._since > HANG_FACTOR * typical + HANG_S:
            self._spend("hang", now - self._since - typical)

    @property
    def _typical(self) -> float | None:
        return statistics.median(self._usual) if len(self._usual) >= 3 else None

    def _rest(self, until: float) -> None:
        """All up to there is what the state says."""
        if self._state == "rendezvous":
            self._spend(
                "rendezvous", min(until, self._entered + _LONGEST_RENDEZVOUS_S) - self._since
            )
            self._spend("waiting", until - self._since)
        self._spend(self._state, until - self._since)

    def _spend(self, state: WallState, seconds: float) -> None:
        if seconds > 0:
            self.seconds[state] += seconds
            self._since += seconds
            self._spent(state, seconds)
