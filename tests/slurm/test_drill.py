"""`orch drill` inside a real Slurm job: faults on the node itself, by a step beside the agents."""

from __future__ import annotations

import json
import sys

import pytest

from tests.beds.bundles import wait_for
from tests.drill.test_drill import TOGETHER

from .test_elastic import JOB

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]
ALLOWED = "backend.allow_drills=true"
PATIENT = "backend.heartbeat_timeout_s=15"
SHORT = "backend.heartbeat_timeout_s=4"


def test_faults_on_the_nodes_of_a_job_and_the_run_goes_on(orch):
    """One that costs time, one a restart, one a node; each hits the rank or node that it says."""
    run = orch.submit(*JOB, ALLOWED, PATIENT, program=(sys.executable, TOGETHER))
    run.step(3)
    refused = orch("drill", run.id, "--faults", "partition", code=64)
    assert (
        "rights on the node; what can be: kill_worker, stop_worker, slow_worker, kill_agent"
        in refused.stderr
    )
    flags = ("--victim", "other", "--for-s", "1", "--limit-s", "300", "--json")
    score = json.loads(
        orch("drill", run.id, "--faults", "slow_worker,stop_worker,kill_node", *flags).stdout
    )
    slow, stop, kill = score["trials"]
    assert slow["ok"] and stop["ok"] and kill["ok"] and not score["stopped"]
    assert stop["noticed_s"] > 0 and kill["stepping_s"] > 0
    (frozen, lost) = [epoch.cause for epoch in run.state().epochs if epoch.cause]
    assert (frozen.kind, frozen.node, frozen.rank) == ("worker_frozen", stop["node"], stop["rank"])
    assert (lost.kind, lost.node) == ("node_lost", kill["node"])
    orch("cancel", run.id)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill_agent", "stop_agent", "kill_worker", "notice"])
def test_the_agent_of_one_node_is_hit_and_the_run_goes_on(orch, fault):
    # A stopped agent is noticed by its silence alone.
    silence = SHORT if fault == "stop_agent" else PATIENT
    run = orch.submit(*JOB, ALLOWED, silence, program=(sys.executable, TOGETHER))
    run.step(3)
    flags = ("--faults", fault, "--victim", "other", "--for-s", "8", "--limit-s", "200", "--json")
    (trial,) = json.loads(orch("drill", run.id, *flags).stdout)["trials"]
    assert trial["ok"] and trial["fault"] == fault
    cause = next((epoch.cause for epoch in run.state().epochs if epoch.cause), None)
    kind = {"kill_worker": "worker_exit", "notice": None}.get(fault, "node_lost")
    assert (cause and cause.kind) == kind and (cause is None or cause.node == trial["node"])
    if fault == "kill_agent":  # its node lives: it comes back in the same attempt of the job
        wait_for(
            lambda: run.state().nodes[trial["node"]].state in ("joined", "running"),
            300,
            "the agent's return",
        )
    orch("cancel", run.id)
