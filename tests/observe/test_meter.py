"""A node's own count of its seconds: all of them, each once, and never fewer than before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.observe.goodput.intervals import STATES
from orchestrator.observe.goodput.meter import WallMeter

doings = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(["rendezvous", "startup", "checkpoint_stall"])),
    st.tuples(st.just("step"), st.integers(1, 9), st.floats(0, 9), st.floats(0, 9)),
    st.tuples(st.just("look")),
)


@given(st.lists(st.tuples(doings, st.floats(0, 50)), max_size=30))
def test_seconds_sum_to_the_time_and_only_grow(happened):
    heard = dict.fromkeys(STATES, 0.0)

    def spent(state: str, seconds: float) -> None:
        assert seconds > 0
        heard[state] += seconds

    now = 7.0
    meter = WallMeter(7.0, spent)
    for (doing, *arguments), after in happened:
        now += after
        getattr(meter, doing)(*arguments, now)
    meter.enter("rendezvous", now)  # nothing is pending then
    assert sum(meter.seconds.values()) == pytest.approx(now - 7.0, abs=1e-6)
    assert heard == pytest.approx(meter.seconds)


def test_a_life_is_told_apart():
    meter = WallMeter(0.0)
    meter.enter("startup", 1.0)
    for number in (1, 2, 3):
        assert meter.step(number, 1.0, 0.0, 3.0 + number) is None  # from 3 on
    meter.step(4, 1.0, 0.5, 7.5)
    meter.enter(
        "rendezvous", 10.5
    )  # a worker died: one step was broken off, and nobody saw it for 2 s
    meter.enter("startup", 11.5)
    assert meter.step(4, 1.0, 0.0, 14.0) == pytest.approx(2.5), "back 2.5 s after it was seen"
    meter.look(14.2)
    want = {
        "rendezvous": 2.0,
        "startup": 2.0 + 1.5,
        "productive": 4.0,
        "checkpoint_stall": 0.5,
        "hang": 2.0,
    }
    assert meter.seconds == pytest.approx({**dict.fromkeys(STATES, 0.0), **want, "replay": 2.0})
    assert meter.ettr == pytest.approx(4 / 14)


def test_what_does_not_end_hangs_and_a_spare_waits():
    meter = WallMeter(0.0)
    meter.look(100.0)
    assert meter.seconds["rendezvous"] == 30 and meter.seconds["waiting"] == 70
    meter.enter("startup", 100.0)
    for number in range(1, 5):
        meter.step(number, 1.0, 0.0, 100.0 + number)
    meter.look(105.0)
    assert meter.seconds["hang"] == 0, "it may be a long step"
    meter.look(120.0)
    assert meter.seconds["hang"] == pytest.approx(15)
    meter.step(5, 16.0, 0.0, 120.0)
    assert meter.seconds["productive"] == pytest.approx(5) and sum(
        meter.seconds.values()
    ) == pytest.approx(120)
