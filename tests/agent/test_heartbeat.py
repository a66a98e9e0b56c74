"""Heartbeats and silence on machines that stand still again and again: two loops, simulated."""

from __future__ import annotations

import random

import pytest

from orchestrator.agent.protocol.heartbeat import HEARTBEAT_S, HeartbeatTimer, timeout_ticks


class Loop:
    """One side: sleeps, ticks, sends; `heard` resets its count. Its own work takes `work_s` a
    tick."""

    def __init__(self, tick_s: float, silence_s: float, work_s: float = 0.0):
        self.tick_s = tick_s
        self.work_s = work_s
        self.most = timeout_ticks(silence_s, tick_s)
        self.beat = HeartbeatTimer(tick_s, 0.0)
        self.began = 0.0
        self.wakes = tick_s
        self.silent = 0
        self.sent = []

    def wake(self, now: float) -> bool:
        """Whether the peer is lost now."""
        due, in_time = self.beat.tick(self.began, now)
        self.sent += [now] * due
        self.silent += in_time
        self.began = now + self.work_s
        self.wakes = self.began + self.tick_s
        return in_time and self.silent >= self.most


def run(
    near: Loop, far: Loop, runs: list[tuple[float, float]], end: float, mute_at: float = 1e9
) -> float | None:
    """When the first side loses the other, which says nothing any more from `mute_at`. `runs`: when
    there is time."""

    remaining_runs = iter(runs)
    begin, stop = next(remaining_runs)

    while (now := min(near.wakes, far.wakes)) < end:
        while stop <= now:
            begin, stop = next(remaining_runs)
        now = max(now, begin)
        for me, peer in ((near, far), (far, near)):
            if me.wakes <= now:
                before = len(me.sent)
                lost = me.wake(now)
                if len(me.sent) > before and (me is near or now < mute_at):
                    peer.silent = 0
                if lost and me is near:
                    return now
    return None


@pytest.mark.parametrize("frozen", [(0.05, 0.4), (0.2, 0.9), (0.5, 1.9), (0.1, 8.0)])
@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_stands_still_again_and_again_loses_nobody(frozen, seed):
    draw = random.Random(seed)
    runs = []
    now = 0.0
    while now < 300:
        runs.append((now, now + draw.uniform(0.02, 0.2)))
        now = runs[-1][1] + draw.uniform(*frozen)
    assert run(Loop(0.25, 3.0), Loop(0.5, 3.0), runs, 290.0) is None


@pytest.mark.parametrize("silence_s", [3.0, 15.0])
@pytest.mark.parametrize("died", [20.0, 20.3, 20.6, 20.9])
def test_who_is_dead_is_lost_in_time(silence_s, died):
    lost = run(Loop(0.25, silence_s), Loop(0.5, silence_s), [(0.0, 1e9)], 60.0, mute_at=died)
    assert silence_s - 1.5 * HEARTBEAT_S - 0.3 <= lost - died <= silence_s + 0.01


def test_work_of_its_own_makes_no_tick_late_and_no_storm():
    busy = Loop(0.25, 3.0, work_s=0.6)  # thousands of members to write to
    lost = run(busy, Loop(0.5, 3.0), [(0.0, 1e9)], 60.0, mute_at=20.0)
    assert (
        lost is not None
        and max(b - a for a, b in zip(busy.sent, busy.sent[1:], strict=False)) < 2.0
    )
    assert min(b - a for a, b in zip(busy.sent, busy.sent[1:], strict=False)) > 0.5
