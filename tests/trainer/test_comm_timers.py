"""Phase times: nested phases never count a second twice."""

import contextlib

from trainer.comm.timers import PhaseTimer


def test_each_second_is_charged_to_the_innermost_phase_also_to_one_that_fails():
    now = iter([0.0, 1.0, 3.0, 4.0, 10.0, 11.0, 11.0, 12.0, 20.0, 22.0])
    timer = PhaseTimer(clock=lambda: next(now))
    with timer.phase("optimizer"), timer.phase("comm"):
        pass
    for _ in range(2):
        with timer.phase("data"):
            pass
    timer.add("data", 0.5)
    with contextlib.suppress(ValueError), timer.phase("forward"):
        raise ValueError
    assert timer.take() == {"optimizer": 2.0, "comm": 2.0, "data": 2.5, "forward": 2.0}
    assert timer.take() == {}
