"""`orch drill` inside a real Slurm job: signals to the agent of one node, through a step beside it."""

from __future__ import annotations

import json
import sys

import pytest

from tests.drill.test_drill import TOGETHER

from .test_elastic import JOB

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_an_agent_that_is_killed_and_one_that_is_frozen_do_not_end_the_run(orch):
    run = orch.submit(*JOB, "backend.heartbeat_timeout_s=4", program=(sys.executable, TOGETHER))
    run.step(3)
    words = ("--faults", "kill_agent,stop_agent", "--victim", "other", "--for-s", "8", "--limit-s", "200", "--json")
    said = json.loads(orch("drill", run.id, *words).stdout)
    assert [(trial["fault"], trial["ok"]) for trial in said["trials"]] == [("kill_agent", True), ("stop_agent", True)]
    assert [epoch.cause.kind for epoch in run.state().epochs[:2]] == ["node_lost", "node_lost"]
    refused = orch("drill", run.id, "--faults", "partition", code=64)
    assert "what can: kill_agent, stop_agent, notice" in refused.stderr
    orch("cancel", run.id)
