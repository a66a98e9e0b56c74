"""`orch drill` on real pods: workers are hit by a process beside them, pods by the API server; the
run goes on."""

from __future__ import annotations

import json

import pytest

from tests.beds.kubernetes.runs import SHORT, TINY

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]

FAULTS = "slow_worker,kill_worker,stop_worker,notice,kill_node"


def test_faults_in_real_pods_and_the_run_goes_on(orch, ended):
    overrides = (*TINY, *SHORT, "train.steps=100000", "backend.max_restarts=9")
    run = ended(orch.submit(*overrides))
    run.step(3)
    refused = orch("drill", run.id, code=78)
    assert "submit with backend.allow_drills=true" in refused.stderr
    orch("cancel", "--force", run.id)
    run = ended(orch.submit(*overrides, "backend.allow_drills=true"))
    run.step(3)
    refused = orch("drill", run.id, "--faults", "stop_agent", code=64)
    assert (
        "process 1 of its pod; what can be: kill_worker, stop_worker, slow_worker, kill_node"
        in refused.stderr
    )
    drill = ("--faults", FAULTS, "--victim", "other", "--for-s", "3", "--limit-s", "600", "--json")
    drill_report = json.loads(orch("drill", run.id, *drill, timeout=3600).stdout)
    assert [trial["fault"] for trial in drill_report["trials"]] == FAULTS.split(
        ","
    ) and not drill_report["stopped"]
    assert all(trial["ok"] for trial in drill_report["trials"]), drill_report["trials"]
    kinds = [epoch.cause.kind for epoch in run.state().epochs if epoch.cause]
    assert kinds[:2] == ["worker_exit", "worker_frozen"]
