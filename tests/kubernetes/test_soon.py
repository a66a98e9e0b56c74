"""Calls at once: their values in order, and a failure only when nothing is under way any more."""

from __future__ import annotations

import threading

import pytest

from orchestrator.backends.kubernetes.api.parallel import Soon, together


def test_values_come_in_the_order_of_the_calls():
    gate = threading.Event()
    assert together(lambda: gate.wait(10) and 1, lambda: gate.set() or 2, lambda: 3) == [1, 2, 3]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_is_told_when_all_have_ended(failing):
    failed, done = threading.Event(), []

    def call(index: int) -> None:
        if index == failing:
            failed.set()
            raise KeyError(index)
        assert failed.wait(10)
        done.append(index)

    calls = [lambda index=index: call(index) for index in range(3)]
    if failing:  # the first runs in this thread: it must not wait for another
        calls[0] = lambda: done.append(0)
    with pytest.raises(KeyError):
        together(*calls)
    assert sorted(done) == [index for index in range(3) if index != failing]


def test_an_error_is_told_to_who_asks_for_the_value():
    soon = Soon(lambda: 1 // 0)
    soon.end()
    with pytest.raises(ZeroDivisionError):
        soon.value()
