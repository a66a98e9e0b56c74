"""`orch plan cluster=slurm`: placed on the nodes that are really free at the moment."""

from __future__ import annotations

import json

import pytest

from orchestrator.plan.exits import Exit
from tests.beds.slurm.runs import Orch

pytestmark = [pytest.mark.slurm, pytest.mark.process]
JOB = ("cluster=slurm", "parallel=tp8_pp4_zero1", "model=llama3_8b")


@pytest.fixture
def orch(cluster, tmp_path):
    return Orch(cluster, tmp_path)


def plan(orch: Orch, *overrides: str) -> dict:
    return json.loads(orch("plan", "--json", *JOB, *overrides).stdout)


def test_all_nodes_of_an_idle_cluster(orch):
    printed_plan = plan(orch)
    assert printed_plan["cluster"]["node_names"] == [f"n{i}" for i in range(8)]
    assert printed_plan["cluster"]["levels"][0]["switches"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert printed_plan["parallel"]["dp"] == 2


def test_only_free_nodes_and_those_that_lie_together(orch):
    orch.cluster.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    job = orch.cluster.run(
        "sbatch", "--parsable", "-w", "n2", "--output=/dev/null", "--wrap", "sleep 60"
    ).strip()
    orch.cluster.wait(lambda: orch.cluster.job_state(job) == "RUNNING", 20, "running job")
    printed_plan = plan(orch, "cluster.nodes=4")
    assert sorted(printed_plan["cluster"]["node_names"]) == ["n4", "n5", "n6", "n7"]
    refused = orch("plan", *JOB, code=Exit.CAPACITY)
    assert "8 nodes are wanted, 6 are free" in refused.stderr
    sizes = orch("plan", *JOB, "nodes=3..8").stdout
    assert "4 nodes  dp=1" in sizes and all(
        f"{nodes} nodes  not legal: " in sizes for nodes in (8, 5)
    )
    assert "3 nodes  pp=" in sizes, "in another pipeline"


def test_a_partition(orch):
    assert len(plan(orch, "cluster.topology_file=slurm:urgent")["cluster"]["node_names"]) == 8
    refused = orch("plan", *JOB, "cluster.topology_file=slurm:urgnet", code=Exit.CONFIG)
    assert "did you mean 'urgent'" in refused.stderr
