"""Nodes that fail again and again, or are slow, are left out: by this run, by whoever coordinates
it, by the next."""

from __future__ import annotations

import os
import subprocess

import pytest

from orchestrator.run.bad_nodes import NodeMemory
from orchestrator.run.environment import compose_environment
from orchestrator.run.request import read_request
from tests.agent.test_elastic import cancel, kill, running, start
from tests.beds.bundles import events

pytestmark = [pytest.mark.process, pytest.mark.slow]
OFTEN = {"max_restarts": 9}


def test_a_node_that_fails_at_one_step_after_the_other_stays_out(runs):
    folder = start(
        runs, 3, 2, 1, run_id="first", rules=OFTEN, wishes={"DIE": "2:5:1:0,2:9:1:1,2:13:1:2"}
    )
    state = running(folder, "node0", "node1", after=2)
    cause = state.epochs[2].cause
    assert (cause.kind, cause.node, cause.step, state.restarts) == ("worker_exit", "node2", 12, 2)
    assert "3 failures in a row on node2, at different steps" in state.excluded["node2"]

    kill(folder, state.writer)  # the next one knows it too
    (remaining_node,) = {"node0", "node1"} - {state.writer}
    state = running(folder, remaining_node, after=state.epoch)
    assert "node2" in state.excluded and state.writer == remaining_node
    request = read_request(folder)
    argv = next(agent.argv for agent in request.agents if agent.node == "node2")
    argv = [*(argument for argument in argv if argument != "--lifeline"), "--elastic"]
    environment = compose_environment(request.environment, os.environ)
    again = subprocess.run(
        argv, env=environment, cwd=folder.path, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 74 and "node node2 is excluded" in again.stderr, again.stderr
    assert cancel(folder).state == "cancelled"

    (bad,) = NodeMemory(runs.parent).read(state.updated_at)
    assert (bad.node, bad.run, bad.cluster) == ("node2", "first", request.cluster)
    assert NodeMemory(runs.parent).read(state.updated_at + 25 * 3600) == []
    second = start(runs, 3, 2, 1, run_id="second", rules=OFTEN)
    state = running(second, "node0", "node1")
    assert [event["on"] for event in events(second, "node_left_out")] == ["node2"]
    assert cancel(second).state == "cancelled"
    third = start(runs, 3, run_id="third", rules=OFTEN)  # it cannot do without
    running(third, "node0", "node1", "node2")
    assert events(third, "bad_nodes_used")
    assert cancel(third).state == "cancelled"


def test_a_straggler_makes_room_for_a_spare(runs):
    folder = start(
        runs,
        3,
        rules=OFTEN | {"on_straggler": "exclude"},
        wishes={"SLOW": "node2:3"},
        spare_nodes=1,
    )
    first = running(folder, "node0", "node1", "node2")
    state = running(folder, "node0", "node1", "spare-0", after=first.epoch)
    cause = next(epoch.cause for epoch in state.epochs if epoch.cause)
    assert (cause.kind, cause.node) == (
        "straggler",
        "node2",
    ) and "3 times the median of its peers" in cause.text
    assert state.restarts == 0 and "node2" in state.excluded
    assert cancel(folder).state == "cancelled"
