"""What breaks under runs, broken for real: lost and unhealthy nodes, a controller that is away."""

from __future__ import annotations

import json
import os
import signal

import pytest

from orchestrator.plan.exits import Exit
from tests.beds.slurm.runs import LONG, Orch, Run

from .test_runs import two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


def test_lost_nodes_are_replaced(orch: Orch):
    """One run loses a node; a second the node of its script and coordinator, where Slurm itself
    requeues the job."""
    second_node_run = orch.submit(*two_nodes("backend.heartbeat_timeout_s=15"), worker=LONG)
    first_node_run = orch.submit(*two_nodes(), worker=LONG)
    second_node_run.step(3)
    first_node_run.step(3)
    lost = second_node_run.assignment["nodes"][1]
    first = first_node_run.assignment["nodes"][0]
    orch.cluster.kill_node(lost)
    orch.cluster.kill_node(first)
    for run in (second_node_run, first_node_run):
        run.requeued()
    second_node_run.until("Slurm notices", lambda: nodes_down(orch) == 2)
    for run, node in ((second_node_run, lost), (first_node_run, first)):
        assert run.finish().exit_code == 0 and node not in run.assignment["nodes"]
    assert second_node_run.start_of(1) > 0, "the workers that were left had saved"
    causes = [epoch.cause for epoch in second_node_run.state().epochs if epoch.cause]
    assert [(cause.kind, cause.node) for cause in causes] == [("node_lost", lost)]


def test_elastic_runs_outlive_their_scripts(orch: Orch):
    """The node of the script and of the coordinator is lost: the agent that is left goes on alone.
    Then it is the one that hears a cancel, ends the job, or asks to bring it back for its full
    size. Slurm without accounting may refuse the size of a job that it has shrunk, and decide.
    """
    elastic = [override for override in two_nodes() if override != "cluster.nodes=2"]
    runs = [orch.submit(*elastic, "nodes=1..2", worker=LONG) for _ in range(3)]
    for run in runs:
        run.step(3)
    for run in runs:
        orch.cluster.kill_node(run.assignment["nodes"][0])
    for run in runs:
        run.until("goes on alone", lambda run=run: alone(run))
    done, cancelled, requeued = runs
    done.release()
    orch.cluster.run("scancel", "--signal=TERM", requeued.job)
    requeued.requeued()
    requeued.until("a size is asked for", lambda: "_slurm_rpc_update_job" in heard(requeued))
    orch("cancel", cancelled.id, code=None)
    assert cancelled.wait("cancelled").exit_code == Exit.RESTART and min(cancelled.saved()[:2]) > 0
    assert done.wait("done").exit_code == 0
    # Before, Slurm would still give the run a node that is lost.
    requeued.until("Slurm notices", lambda: nodes_down(orch) == 3)
    assert requeued.finish().exit_code == 0 and requeued.restarts >= 1, requeued.logs()
    over = ("squeue", "-h", "-o", "%i")
    done.until("no job is left", lambda: not orch.cluster.run(*over).strip())


def heard(run: Run) -> str:
    """What Slurm's controller says of the requests for a job."""
    log = (run.orch.cluster.home / "log" / "slurmctld.log").read_text()
    return "\n".join(line for line in log.splitlines() if f"JobId={run.job} " in line)


def nodes_down(orch: Orch) -> int:
    counts = orch.cluster.run("sinfo", "-h", "-p", "main", "-t", "down", "-o", "%D")
    return sum(map(int, counts.split()))


def alone(run: Run) -> bool:
    state = run.state()
    return (
        state.state == "running"
        and state.epoch > 0
        and len({rank["node"] for rank in run.plan["ranks"]}) == 1
    )


def test_a_sick_node_is_left_out(orch: Orch):
    """A worker that leaves with 74 says that its node is unhealthy: the job comes back on
    others."""
    run = orch.submit(*two_nodes("backend.options.exclude=[n7]"), worker=LONG | {"DIE": "2:2:74:0"})
    run.requeued()
    unhealthy = json.loads((run.folder / "state.json").read_text())["cause"]["node"]
    run.start_next_attempt()
    assert run.wait("done").exit_code == 0
    assert not {unhealthy, "n7"} & set(run.assignment["nodes"])


def test_the_controller_is_restarted_during_a_run(orch: Orch):
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(3)
    orch.cluster.stop_controller()
    state = run.state()
    assert state.state == "running" and "scontrol ping" in (state.reason or ""), (
        "the run folder still answers"
    )
    orch.cluster.start_controller()
    run.release()
    assert run.wait("done").exit_code == 0
    assert run.restarts == 0


def test_notice_while_the_controller_is_away(orch: Orch):
    """The agents get their notice, the run saves, and the requeue waits until the controller is
    back."""
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(3)
    orch.cluster.stop_controller()
    node = run.assignment["nodes"][0]
    state = json.loads((run.folder / "state.json").read_text())
    os.kill(state["nodes"][node]["pid"], signal.SIGTERM)
    run.until("saved", lambda: len(list(run.folder.glob("saved-*"))) == 4)
    orch.cluster.start_controller()
    run.start_next_attempt()
    assert run.wait("done").epoch == 1
