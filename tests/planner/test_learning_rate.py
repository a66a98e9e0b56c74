"""Learning-rate schedules at their corners, and as properties."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.document import Optim
from orchestrator.plan.learning_rate import jump, learning_rate, remembered


def optim(**changes) -> Optim:
    fields = {
        "lr": 1.0,
        "min_lr_ratio": 0.1,
        "schedule": "cosine",
        "warmup_steps": 10,
        "decay_steps": 0,
    }
    return Optim(**fields | changes, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule):
    rates = [learning_rate(step, optim(schedule=schedule), 100) for step in range(1, 11)]
    assert rates == pytest.approx([step / 10 for step in range(1, 11)])


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_floor():
    assert learning_rate(55, optim(), 100) == pytest.approx(0.55)
    assert learning_rate(100, optim(), 100) == pytest.approx(0.1)
    assert learning_rate(60, optim(decay_steps=60), 100) == learning_rate(
        99, optim(decay_steps=60), 100
    )


def test_wsd_is_flat_then_linear_over_its_last_steps():
    wsd = optim(schedule="wsd", decay_steps=20)
    assert {learning_rate(step, wsd, 100) for step in range(10, 81)} == {1.0}
    assert learning_rate(90, wsd, 100) == pytest.approx(0.55)
    assert learning_rate(100, wsd, 100) == pytest.approx(0.1)
    assert learning_rate(95, optim(schedule="wsd"), 100) == pytest.approx(
        0.55
    )  # 0: a tenth of the run


@given(
    st.sampled_from(["constant", "cosine", "wsd"]),
    st.integers(0, 50),
    st.integers(0, 80),
    st.integers(1, 100),
    st.floats(0, 1),
)
def test_always_between_nothing_and_the_peak_and_never_rising_after_warm_up(
    name, warmup, decay, total, ratio
):
    spec = optim(schedule=name, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=ratio)
    rates = [learning_rate(step, spec, total) for step in range(1, 130)]
    assert all(0 < rate <= 1 + 1e-12 or (rate == 0 and ratio < 1e-12) for rate in rates)
    after = rates[max(warmup - 1, 0) :]
    assert all(b <= a + 1e-12 for a, b in pairwise(after))


def test_steps_count_from_one():
    with pytest.raises(ValueError):
        learning_rate(0, optim(), 100)


@given(
    st.sampled_from(["constant", "cosine", "wsd"]),
    st.integers(0, 20),
    st.integers(0, 40),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_a_schedule_goes_on_where_it_was_saved_and_any_other_rate_is_said(
    name, warmup, decay, step, total
):
    spec = optim(schedule=name, warmup_steps=warmup, decay_steps=decay)
    saved = remembered(step, spec, total)
    assert jump(saved, step, spec, total) == ""
    for changes in (
        {"lr": 2.0},
        {"warmup_steps": warmup + 7},
        {"schedule": "constant"},
        {"min_lr_ratio": 0.5},
    ):
        changed_spec = optim(
            **{"schedule": name, "warmup_steps": warmup, "decay_steps": decay} | changes
        )
        rate = learning_rate(step, changed_spec, total)
        breaks = step < total and rate != pytest.approx(saved["learning_rate"], rel=1e-6)
        message = jump(saved, step, changed_spec, total)
        assert bool(message) == breaks
        following = learning_rate(step + 1, changed_spec, total)
        assert not breaks or f"to {following:.3g} at step {step + 1}" in message


def test_what_remembers_no_rate_says_nothing():
    assert (
        jump({"optimizer_steps": 3.0}, 3, optim(), 100)
        == remembered(0, optim(), 100).get("", "")
        == ""
    )
    for rate in (0.3, 0.1):
        assert "keeps the old curve" not in jump({"learning_rate": rate}, 50, optim(), 100)
    equal = optim(warmup_steps=20, decay_steps=20)
    assert "nan" not in jump(remembered(20, equal, 20), 20, optim(warmup_steps=20), 40)
