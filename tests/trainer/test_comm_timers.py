"""Phase times: nested phases never count a second twice."""

from trainer.comm.timers import PhaseTimer


def test_each_second_is_charged_to_the_innermost_phase():
    now = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0])
    timer = PhaseTimer(clock=lambda: next(now))
    with timer.phase("optimizer"), timer.phase("comm"):
        pass
    with timer.phase("data"):
        pass
    assert timer.take() == {"optimizer": 2.0, "comm": 2.0, "data": 1.0}
    assert timer.take() == {}


def test_repeated_phases_and_given_seconds_add_up():
    now = iter([0.0, 1.0, 1.0, 2.0])
    timer = PhaseTimer(clock=lambda: next(now))
    for _ in range(2):
        with timer.phase("data"):
            pass
    timer.add("data", 0.5)
    assert timer.take() == {"data": 2.5}


def test_a_failing_phase_is_charged_too():
    now = iter([0.0, 2.0])
    timer = PhaseTimer(clock=lambda: next(now))
    try:
        with timer.phase("forward"):
            raise ValueError
    except ValueError:
        pass
    assert timer.take() == {"forward": 2.0}
