"""Every second of a run is in exactly one state, whatever happened to it and in whatever order it
was told."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.observe.goodput.account import account
from orchestrator.observe.goodput.intervals import STATES, Interval, partition, totals
from orchestrator.observe.goodput.run_timeline import EpochSpan, RunTimeline
from orchestrator.observe.timeline import Step
from orchestrator.run.state import Cause

times = st.floats(0, 100)


def tiles_exactly(intervals: list[Interval], start: float, end: float) -> None:
    assert intervals[0].start == start and intervals[-1].end == end
    assert all(a.end == b.start for a, b in itertools.pairwise(intervals))
    assert all(interval.start < interval.end for interval in intervals)
    assert all(a.state != b.state for a, b in itertools.pairwise(intervals)), (
        "neighbours are joined"
    )
    assert math.isclose(sum(totals(intervals).values()), end - start, rel_tol=1e-9)


@given(
    st.tuples(times, times).map(sorted),
    st.lists(st.tuples(times, st.sampled_from(STATES)), max_size=12),
    st.lists(st.builds(Interval, times, times, st.sampled_from(STATES)), max_size=12),
)
def test_any_moments_and_pieces_tile_the_time(span, moments, pieces):
    start, end = span
    intervals = partition(start, end, moments, pieces)
    if start == end:
        assert intervals == []
        return
    tiles_exactly(intervals, start, end)
    for (
        interval_start,
        interval_end,
        state,
    ) in intervals:  # what is shown at a time is what somebody said of it
        middle = (interval_start + interval_end) / 2
        possible_states = {state for at, state in moments if at <= middle} | {"waiting"}
        assert state in possible_states | {
            piece.state for piece in pieces if piece.start <= middle <= piece.end
        }


def a_run(seed: int, faults: int) -> tuple[RunTimeline, dict[str, float]]:
    """A run of steps of one second with faults between; and what it must come to, state by
    state."""
    draw = random.Random(seed)
    want = dict.fromkeys(STATES, 0.0)
    now = 1000.0
    epochs = []
    steps = []
    pauses = []
    arrivals = []
    saves = []

    def spend(state: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        want[state] += seconds

    spend("waiting", draw.uniform(0, 5))
    arrivals.append(now)
    spend("rendezvous", 0.5)
    done = furthest = 0
    for epoch in range(faults + 1):
        began = now
        spend("rendezvous", draw.uniform(0.1, 2))
        running = now
        spend("startup", draw.uniform(0.1, 3))
        first = True
        for _ in range(draw.randint(3, 8)):
            stall = 0.0 if first or draw.random() < 0.7 else draw.uniform(0.1, 1)
            spend("checkpoint_stall", stall)
            done += 1
            spend("productive" if done > furthest else "replay", 1.0)
            furthest = max(furthest, done)
            first = False
            steps.append(Step(epoch, done, now, 1.0, stall, done * 4))
        kind = draw.choice(["fault", "resize", "whole"]) if epoch < faults else "done"
        if kind == "fault":
            spend("replay", 1.0)  # the step that was broken off, and only then a silence
            spend("hang", draw.uniform(0.5, 4))
        elif kind == "resize":
            spend("checkpoint_stall", 0.25)
            saves.append((now, 0.25, epoch))
        noticed = now
        spend("rendezvous", draw.uniform(0.1, 1))
        cause = Cause(kind="node_lost", text="gone", epoch=epoch) if kind == "fault" else None
        outcome = "done" if kind == "done" else "restart"
        times = {"began": began, "running": running, "noticed": noticed, "ended": now}
        epochs.append(EpochSpan(epoch=epoch, **times, cause=cause, outcome=outcome))
        if kind == "whole":  # the run ended, and somebody resumed it
            stopped = now
            spend("waiting", draw.uniform(0.5, 20))
            pauses.append((stopped, now))
            arrivals.append(now)
            spend("rendezvous", 0.2)
        if kind == "fault":
            done = max(0, done - draw.randint(0, 3))
    draw.shuffle(epochs), draw.shuffle(steps), draw.shuffle(arrivals)
    run = RunTimeline(
        1000.0, now, sorted(epochs, key=lambda x: x.epoch), steps, pauses, arrivals, saves
    )
    return run, want


@given(st.integers(0, 10**6), st.integers(0, 6))
def test_seconds_of_each_state_are_those_that_were_spent(seed, faults):
    run, want = a_run(seed, faults)
    accounted = account(run, now=0.0)
    tiles_exactly(accounted.intervals, run.created, run.ended)
    for state in STATES:
        assert accounted.seconds[state] == pytest.approx(want[state], abs=1e-6), state
    assert accounted.ettr == pytest.approx(want["productive"] / (run.ended - run.created))
    assert math.isclose(sum(accounted.seconds.values()), accounted.wall_s, rel_tol=1e-9)


STEPS = st.builds(
    Step, st.integers(0, 4), st.integers(1, 9), times, times, times, st.integers(0, 99)
)


@given(st.integers(0, 10**6), st.lists(STEPS, max_size=20))
def test_damaged_records_still_count_each_second_once(seed, strange):
    """Clocks that disagree, epochs that nobody has written down, steps that overlap."""
    run, _ = a_run(seed, 2)
    steps = run.steps + [step._replace(at=step.at + 990) for step in strange]
    epochs = run.epochs[: seed % 3]
    for ended in (run.ended, None):
        odd = RunTimeline(run.created, ended, epochs, steps, run.pauses, run.arrivals, run.saves)
        accounted = account(odd, now=run.ended + 7)
        tiles_exactly(accounted.intervals, odd.created, run.ended if ended else run.ended + 7)
        assert len(accounted.faults) == sum(
            1 for span in epochs if span.cause or span.outcome == "restart"
        )


def test_a_fault_says_what_it_has_cost():
    cause = Cause(
        kind="worker_exit",
        text="rank 1 on b: killed by SIGKILL",
        epoch=0,
        node="b",
        rank=1,
        code=-9,
    )
    epochs = [
        EpochSpan(
            epoch=0, began=1.0, running=2.0, noticed=9.0, ended=9.5, cause=cause, outcome="restart"
        ),
        EpochSpan(epoch=1, began=9.5, running=10.0),
    ]
    steps = [Step(0, n, 3.0 + n, 1.0, 0.0, n) for n in (1, 2, 3)]  # the last one ends at 6
    steps += [Step(1, n, 10.0 + n, 1.0, 0.0, n) for n in (2, 3, 4)]  # from 11 on
    accounted = account(RunTimeline(0.0, None, epochs, steps, [], [0.5]), now=14.2)
    (fault,) = accounted.faults
    assert (fault.epoch, fault.kind, fault.node, fault.rank, fault.code) == (
        0,
        "worker_exit",
        "b",
        1,
        -9,
    )
    assert (fault.at, fault.noticed_s, fault.back_s, fault.lost_steps) == (6.0, 3.0, 2.0, 2)
    # a step broken off and 2 s of hang, 1 s to begin again, 1 s of start-up, 2 steps once more
    assert fault.lost_s == pytest.approx(1 + 2 + 1 + 1 + 2)
    assert accounted.seconds["productive"] == pytest.approx(3 + 1 + 0.2), "and a step is under way"
    assert accounted.seconds["hang"] == pytest.approx(2) and accounted.seconds[
        "replay"
    ] == pytest.approx(3)


def test_an_epoch_that_only_saves_is_a_stall_and_no_fault():
    cause = Cause(kind="node_lost", text="gone", epoch=0)
    epochs = [
        EpochSpan(
            epoch=0, began=0.0, running=0.0, noticed=3.0, ended=3.0, cause=cause, outcome="failed"
        ),
        EpochSpan(epoch=1, began=4.0, ended=9.0, outcome="saved"),
    ]
    steps = [Step(0, n, float(n), 1.0) for n in (1, 2, 3)]
    accounted = account(RunTimeline(0.0, 10.0, epochs, steps, saves=[(8.0, 3.0, 1)]), now=10.0)
    assert accounted.seconds["checkpoint_stall"] == pytest.approx(3) and accounted.seconds[
        "productive"
    ] == pytest.approx(3)
    assert [fault.epoch for fault in accounted.faults] == [0]


def test_a_step_that_takes_far_longer_than_usual_hangs():
    span = EpochSpan(epoch=0, began=0.0, running=0.0)
    steps = [
        Step(0, 1, 1.0, 1.0),
        Step(0, 2, 2.0, 1.0),
        Step(0, 3, 3.0, 1.0),
        Step(0, 4, 33.0, 30.0),
    ]
    accounted = account(RunTimeline(0.0, None, [span], steps), now=34.0)
    assert accounted.seconds["hang"] == pytest.approx(29) and accounted.seconds[
        "productive"
    ] == pytest.approx(5)
    silent = account(RunTimeline(0.0, None, [span], steps), now=60.0)
    assert silent.seconds["hang"] == pytest.approx(29 + 26), (
        "and one that does not end hangs by now"
    )


def test_a_run_that_was_killed_with_all_it_had_waits_until_somebody_resumes_it():
    epochs = [
        EpochSpan(epoch=0, began=1.0, running=2.0),
        EpochSpan(epoch=1, began=101.0, running=102.0),
    ]
    steps = [
        Step(0, 1, 3.0, 1.0),
        Step(0, 2, 4.0, 1.0),
        Step(1, 2, 104.0, 1.0),
        Step(1, 3, 105.0, 1.0),
    ]
    run = RunTimeline(
        0.0, 105.0, epochs, steps, [(2.5, 100.0)], [0.0, 100.5]
    )  # its state was last written at 2.5
    accounted = account(run, 0.0)
    assert accounted.seconds["waiting"] == pytest.approx(96.5) and accounted.seconds[
        "replay"
    ] == pytest.approx(1)
