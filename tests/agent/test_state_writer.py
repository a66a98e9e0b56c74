"""The state of elastic runs: who may write it, and what another process's late write is worth."""

from __future__ import annotations

import json

import pytest

from orchestrator.agent.leader.state_writer import StateWriter
from orchestrator.agent.protocol.messages import Join
from orchestrator.run.epoch_lease import EpochLease, LeaseLost
from orchestrator.run.registry import Discovery
from orchestrator.run.state import NodeState, read_state, write_state
from tests.beds.coordinated import PLAN, make_folder


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def record(folder, node, epoch) -> StateWriter:
    claims = EpochLease(folder, node)
    claims.take(epoch)
    return StateWriter(folder, PLAN, node, Discovery(folder, str(folder.path / "sd")), claims)


def test_the_claim_that_made_it_coordinator_is_its_first_epoch(folder):
    pen = record(folder, "node0", 0)
    pen.begin_epoch()
    assert (pen.epoch, pen.leased_epoch) == (0, 0)
    pen.lease_next_epoch()
    pen.lease_next_epoch()  # one ahead, whoever asks how often
    assert (pen.epoch, pen.leased_epoch) == (0, 1)
    pen.begin_epoch()
    assert read_state(folder).epoch == 1


def test_nothing_is_written_after_a_newer_claim(folder):
    old = record(folder, "node0", 0)
    old.begin_epoch()
    nodes = {
        name: NodeState(state="running", ranks=[index])
        for index, name in enumerate(("node0", "node1"))
    }
    old.update(state="running", nodes=nodes)
    new = record(folder, "node1", 1)
    before = folder.state.read_bytes()
    changes = lambda: old.record_lost("node1"), lambda: old.update(reason="x")
    for write in (old.begin_epoch, old.record_running, old.rewrite_if_replaced, *changes):
        with pytest.raises(LeaseLost):
            write()
    assert folder.state.read_bytes() == before
    assert new.take_over() == {"node0"}
    state = read_state(folder)
    assert (state.nodes["node0"].state, state.writer, state.epochs[0].outcome) == (
        "lost",
        "node1",
        "restart",
    )


def test_a_write_that_had_frozen_on_its_way_is_put_right(folder):
    stale = read_state(folder)
    pen = record(folder, "node1", 0)
    pen.begin_epoch()
    truth = folder.state.read_bytes()
    pen.rewrite_if_replaced()
    assert folder.state.read_bytes() == truth
    write_state(folder, stale)
    pen.rewrite_if_replaced()
    assert folder.state.read_bytes() == truth


def test_a_spare_that_comes_changes_nothing_for_those_who_run(folder):
    pen = record(folder, "node0", 0)
    pen.begin_epoch()
    joins = {
        "host": "h",
        "address": "a",
        "pid": 1,
        "gpus": 1,
        "nics": 0,
        "plan_hash": PLAN.hash,
        "metrics": "h:1",
    }
    pen.record_joined({name: Join(node=name, **joins) for name in ("node0", "node1")})
    pen.record_running()
    pen.record_lost("node1")
    pen.record_spare("spare-0", Join(node="spare-0", **joins))
    nodes = read_state(folder).nodes
    states = {name: node.state for name, node in nodes.items()}
    assert states == {"node0": "running", "node1": "lost", "spare-0": "joined"}
    target_nodes = [entry["labels"]["node"] for entry in json.loads(folder.discovery.read_text())]
    assert sorted(target_nodes) == ["node0", "spare-0"]
    pen.record_running()
    assert read_state(folder).nodes["spare-0"].state == "joined", "it holds no rank"
