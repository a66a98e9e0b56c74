"""What breaks under runs, broken for real: lost and sick nodes, a controller that is away."""

from __future__ import annotations

import json
import os
import signal

import pytest

from .runs import LONG, Orch
from .test_runs import two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


def test_lost_nodes_are_replaced(orch: Orch):
    """One run loses a node, another the node of its script and coordinator, where Slurm itself requeues the job. That
    one is elastic: until Slurm has noticed, the agent that is left goes on alone.
    """
    one = orch.submit(*two_nodes("backend.heartbeat_timeout_s=4"), wishes=LONG)
    other = orch.submit(*(word for word in two_nodes() if word != "cluster.nodes=2"), "nodes=1..2", wishes=LONG)
    one.step(3)
    other.step(3)
    lost, first = one.placement["nodes"][1], other.placement["nodes"][0]
    orch.cluster.kill_node(lost)
    orch.cluster.kill_node(first)
    other.until("goes on alone", lambda: other.state().epoch == 1 and other.state().state == "running")
    for run in (one, other):
        run.requeued()
    down = ("sinfo", "-h", "-p", "main", "-t", "down", "-o", "%D")
    one.until("Slurm notices", lambda: orch.cluster.run(*down).strip() == "2")
    for run, node in ((one, lost), (other, first)):
        assert run.finish().exit_code == 0 and node not in run.placement["nodes"]
    assert one.start_of(1) > 0, "the workers that were left had saved"
    assert other.state().epoch == 2 and len(other.placement["nodes"]) == 2, "and is whole again"
    causes = [epoch.cause for epoch in one.state().epochs if epoch.cause]
    assert [(cause.kind, cause.node) for cause in causes] == [("node_lost", lost)]


def test_a_sick_node_is_left_out(orch: Orch):
    """A worker that leaves with 74 says that its node is unhealthy: the job comes back on others."""
    run = orch.submit(*two_nodes("backend.options.exclude=[n7]"), wishes=LONG | {"DIE": "2:2:74:0"})
    run.requeued()
    sick = json.loads((run.folder / "state.json").read_text())["cause"]["node"]
    run.come_back()
    assert run.wait("done").exit_code == 0
    assert not {sick, "n7"} & set(run.placement["nodes"])


def test_the_controller_is_restarted_during_a_run(orch: Orch):
    run = orch.submit(*two_nodes(), wishes=LONG)
    run.step(3)
    orch.cluster.stop_controller()
    state = run.state()
    assert state.state == "running" and "scontrol ping" in (state.reason or ""), "the run folder still answers"
    orch.cluster.start_controller()
    run.release()
    assert run.wait("done").exit_code == 0
    assert run.restarts == 0


def test_notice_while_the_controller_is_away(orch: Orch):
    """The steps get their SIGTERM, the run saves, and the requeue waits until the controller is back."""
    run = orch.submit(*two_nodes(), wishes=LONG)
    run.step(3)
    orch.cluster.stop_controller()
    node = run.placement["nodes"][0]
    state = json.loads((run.folder / "state.json").read_text())
    os.kill(state["nodes"][node]["pid"], signal.SIGTERM)
    run.until("saved", lambda: len(list(run.folder.glob("saved-*"))) == 4)
    orch.cluster.start_controller()
    run.come_back()
    assert run.wait("done").epoch == 1
