"""`orch drill` inside a real Slurm job: signals to the agent of one node, through a step beside it."""

from __future__ import annotations

import json
import sys

import pytest

from tests.drill.test_drill import TOGETHER

from .test_elastic import JOB

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("fault", ["kill_agent", "stop_agent"])
def test_the_agent_of_one_node_is_hit_and_the_run_goes_on(orch, fault):
    run = orch.submit(*JOB, "backend.heartbeat_timeout_s=4", program=(sys.executable, TOGETHER))
    run.step(3)
    words = ("--faults", fault, "--victim", "other", "--for-s", "8", "--limit-s", "200", "--json")
    (trial,) = json.loads(orch("drill", run.id, *words).stdout)["trials"]
    assert trial["ok"] and trial["fault"] == fault
    cause = run.state().epochs[0].cause
    assert (cause.kind, cause.node) == ("node_lost", trial["node"])
    refused = orch("drill", run.id, "--faults", "partition", code=64)
    assert "what can: kill_agent, stop_agent, notice" in refused.stderr
    orch("cancel", run.id)
