"""The contract of every backend (tests/backends), on real pods."""

from __future__ import annotations

import pytest

from tests.beds.contract import cancel_and_resume, refusals
from tests.beds.kubernetes.runs import TINY, stand_in

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
TWO_PODS = ("cluster=local", "cluster.nodes=2", "cluster.gpus_per_node=2", "parallel=tp2_zero1")


def test_a_run_is_cancelled_resumed_and_done(orch):
    """Its workers stand in for the trainer, which trains in pods in test_chart_trains.py."""
    refusals(orch, [*orch.submission()[1:], *TINY])
    run = orch.submit(*TWO_PODS, *stand_in(STEPS=12, SAVE=1, HOLD=1))
    # One that is told to end before it has written its pid saves nothing.
    run.until("four workers", lambda: len(list(run.inside.glob("pid-0-*"))) == 4)

    def release() -> None:
        assert len(list(run.inside.glob("saved-*"))) == 4
        (run.inside / "go").touch()

    cancel_and_resume(orch, run, release)
