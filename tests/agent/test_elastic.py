"""Elastic runs as real processes: any node may die, freeze, leave or come back, and the run goes
on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator

import pytest

from orchestrator.backends.base import read_record
from orchestrator.backends.local import namespaces
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.errors import OrchError
from orchestrator.plan import Plan, load_plan
from orchestrator.planner.elastic.replan import replan
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, send_signal
from orchestrator.run.request import read_request
from orchestrator.run.state import RunState, read_state
from tests.beds.bundles import events, no_namespaces, submit, wait_end, wait_for
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process


BATCH = 12  # samples: every size up to four nodes divides it


def sized(nodes: int, **fields) -> Plan:
    """One rank a node; more accumulation where there are fewer of them. With the planner's
    predictions."""
    fields = {"steps": 100_000} | fields
    plan = make_plan(dp=nodes, nodes=nodes, micro_batches=BATCH // nodes, **fields)
    return replan(plan, plan.cluster)


def start(runs, *sizes: int, run_id="test-run", rules=None, wishes=None, **options) -> RunFolder:
    """A run of the largest of the sizes, whose workers save when they are told to end. `options`:
    of the backend."""
    plans = {nodes: sized(nodes) for nodes in sizes}
    does = {"STEPS": 100_000, "STEP_S": 0.05, "SAVE": 1} | (wishes or {})
    backend = {"options": options} | (rules or {})
    return submit(plans[max(sizes)], runs, run_id=run_id, backend=backend, sizes=plans, **does)


def running(folder: RunFolder, *nodes: str, after: int = -1) -> RunState:
    """Until workers run on exactly these nodes, in an epoch after `after`."""

    def reached():
        state = read_state(folder)
        busy = {
            name for name, node in state.nodes.items() if node.state == "running" and node.ranks
        }
        if state.state == "running" and state.epoch > after and busy == set(nodes):
            return state
        assert not state.is_final, state.reason
        return None

    try:
        return wait_for(reached, what=f"workers on {nodes}")
    except AssertionError as error:
        logs = "\n".join(
            f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.logs.glob("agent*"))
        )
        raise AssertionError(f"{error}\n{folder.state.read_text()}\n{logs}") from None


def agent(folder: RunFolder, node: str) -> int:
    return read_record(folder, LocalRecord).agents[node]


def kill(folder: RunFolder, node: str, signum: int = signal.SIGKILL) -> None:
    os.kill(agent(folder, node), signum)


@contextlib.contextmanager
def nobody_brought_back(folder: RunFolder) -> Iterator[None]:
    """The run's supervisor stands still, and so does not start the agents of lost nodes again."""
    supervisor = Identity(*read_record(folder, LocalRecord).supervisor)
    assert send_signal(supervisor, signal.SIGSTOP)
    try:
        yield
    finally:
        send_signal(supervisor, signal.SIGCONT)


def cancel(folder: RunFolder) -> RunState:
    LocalBackend().cancel(folder, force=False)
    return wait_end(folder)


def test_losing_nodes_one_after_the_other_and_then_too_many(runs):
    folder = start(runs, 3, 2)
    first = running(folder, "node0", "node1", "node2")
    kill(folder, "node2")
    second = running(folder, "node0", "node1", after=first.epoch)
    plan = load_plan(folder.plan)
    assert plan.hash == second.plan_hash and plan.parallel.dp == 2
    assert (
        plan.parallel.micro_batches * plan.parallel.dp
        == BATCH
        == plan.parallel.global_batch_samples
    )
    assert second.nodes["node2"].state == "lost" and second.restarts == 0
    assert second.epochs[first.epoch].cause.kind == "node_lost"
    kill(folder, "node1")
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.cause.node) == ("failed", 76, "node1")
    assert "1 nodes are left, the smallest size of this run is 2" in state.reason


def test_the_coordinator_moves_and_moves_again(runs):
    folder = start(runs, 3, 2, 1)
    first = running(folder, "node0", "node1", "node2")
    survivors = set(first.nodes) - {first.writer}
    kill(folder, first.writer)
    second = running(folder, *survivors, after=first.epoch)
    cause = second.epochs[-2].cause
    assert (cause.kind, cause.node) == (
        "coordinator_lost",
        first.writer,
    ) and second.writer in survivors
    kill(folder, second.writer)
    third = running(folder, *survivors - {second.writer}, after=second.epoch)
    assert {third.writer} == survivors - {second.writer}
    assert [e.epoch for e in third.epochs] == sorted({e.epoch for e in third.epochs})
    claims = {
        int(path.name) for path in (folder.path / "claims").iterdir() if path.name.isdecimal()
    }
    assert {epoch.epoch for epoch in third.epochs} <= claims and max(claims) == third.epoch
    assert cancel(folder).state == "cancelled"
    LocalBackend().resume(folder, read_request(folder), os.environ)
    fourth = running(folder, "node0", "node1", "node2", after=third.epoch)  # all are started again
    assert (
        load_plan(folder.plan).parallel.dp == 3 and fourth.plan_hash == load_plan(folder.plan).hash
    )
    assert cancel(folder).state == "cancelled"


def test_a_frozen_coordinator_is_succeeded_and_fenced_when_it_wakes(runs):
    """It wakes as the writer that it was; the newer claim stops it before it writes."""
    folder = start(runs, 3, 2, rules={"heartbeat_timeout_s": 5.0})
    first = running(folder, "node0", "node1", "node2")
    frozen = agent(folder, first.writer)
    os.kill(frozen, signal.SIGSTOP)
    survivors = set(first.nodes) - {first.writer}
    second = running(folder, *survivors, after=first.epoch)
    os.kill(frozen, signal.SIGCONT)
    wait_for(
        lambda: read_record(folder, LocalRecord).exit_codes.get(first.writer) == 77,
        what="77 of the frozen agent",
    )
    assert running(folder, *survivors).epoch == second.epoch, "nobody else noticed"
    assert (
        events(folder, "deposed")
        and json.loads(folder.coordinator.read_text())["node"] == second.writer
    )
    assert cancel(folder).state == "cancelled"


def test_a_node_comes_back_and_the_run_grows_at_a_step_boundary(runs):
    rules = {"min_nodes_grace_s": 2 * PATIENCE_S}
    folder = start(runs, 3, 2, rules=rules, restart_lost_nodes_after_s=0.2, grow_after_s=1.0)
    first = running(folder, "node0", "node1", "node2")
    with nobody_brought_back(folder):
        kill(folder, "node1")
        running(folder, "node0", "node2", after=first.epoch)
    third = running(folder, "node0", "node1", "node2", after=first.epoch + 1)
    growing = third.epochs[-2]
    assert growing.outcome == "restart" and growing.cause is None and not growing.counted
    assert len({(folder.path / f"saved-{rank}").read_text() for rank in range(2)}) >= 1, (
        "saved before it stopped"
    )
    assert [e["how"] for e in events(folder, "replanned")] == ["shrink", "grow"]
    drained_node = next(node for node in third.nodes if node != third.writer)
    with nobody_brought_back(folder):
        kill(folder, drained_node, signal.SIGTERM)  # drained, and in service again
        running(folder, *third.nodes.keys() - {drained_node}, after=third.epoch)
    running(folder, "node0", "node1", "node2", after=third.epoch + 1)
    assert [e["how"] for e in events(folder, "replanned")][2:] == ["shrink", "grow"]
    last = running(folder, "node0", "node1", "node2")
    for node in last.nodes.keys() - {last.writer}:  # one is too few: it waits for a second
        kill(folder, node)
    wait_for(
        lambda: read_state(folder).epoch > last.epoch and read_state(folder).state == "running",
        what="two nodes",
    )
    assert cancel(folder).state == "cancelled"


def test_a_spare_takes_the_seat_and_a_node_that_is_told_to_end_leaves(runs):
    folder = start(runs, 3, 2, spare_nodes=1)
    first = running(folder, "node0", "node1", "node2")
    wait_for(lambda: "spare-0" in read_state(folder).nodes, what="the spare")
    before = load_plan(folder.plan)
    kill(folder, "node2")
    second = running(folder, "node0", "node1", "spare-0", after=first.epoch)
    after = load_plan(folder.plan)
    assert [rank.node for rank in after.ranks] == ["node0", "node1", "spare-0"]
    assert after.ranks[:2] == before.ranks[:2] and after.parallel == before.parallel
    kill(
        folder, second.writer, signal.SIGTERM
    )  # its machine is drained: it saves with the others and goes
    survivors = {"node0", "node1", "spare-0"} - {second.writer}
    third = running(folder, *survivors, after=second.epoch)
    left_off = next(epoch for epoch in third.epochs if epoch.epoch == second.epoch)
    assert (left_off.outcome, left_off.cause) == ("restart", None)
    assert read_record(folder, LocalRecord).exit_codes[second.writer] == 75
    assert third.writer != second.writer, "the coordinator's role has moved too"
    assert cancel(folder).state == "cancelled"


def test_a_frozen_worker_is_found_named_and_replaced(runs):
    folder = start(runs, 2, 1, rules={"max_restarts": 1})
    first = running(folder, "node0", "node1")
    path = folder.path / f"pid-{first.epoch}-1"
    pid = int(wait_for(lambda: path.exists() and path.read_text(), what="rank 1"))
    os.kill(pid, signal.SIGSTOP)
    second = running(folder, "node0", "node1", after=first.epoch)
    cause = second.epochs[-2].cause
    assert (cause.kind, cause.rank, cause.code, cause.node) == ("worker_frozen", 1, -9, "node1")
    assert (
        cause.tail[-1] == f"orch: {cause.text}: killed"
        and "stopped by a signal (state T)" in cause.text
    )
    assert cancel(folder).state == "cancelled"


@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
def test_a_coordinator_that_is_cut_off_leaves_the_run_to_the_larger_side(runs):
    """Too few are left on its side. It stands back, the others claim, and after the cut is healed
    it is fenced."""
    folder = start(
        runs, 3, 2, rules={"heartbeat_timeout_s": 5.0}, network="namespaces", link_gbit_per_s=0.5
    )
    first = running(folder, "node0", "node1", "node2")
    record = read_record(folder, LocalRecord)
    index = int(first.writer[-1])
    holders = [record.supervisor[0], *record.agents.values()]
    namespaces.cut(holders, record.switches, index)
    survivors = set(first.nodes) - {first.writer}
    second = running(folder, *survivors, after=first.epoch)
    wait_for(
        lambda: read_record(folder, LocalRecord).exit_codes.get(first.writer) == 77,
        what="77 of the cut off side",
    )
    namespaces.heal(
        [record.supervisor[0], *(record.agents[node] for node in survivors)], record.switches, index
    )
    assert events(folder, "stepped_back") and events(folder, "deposed")
    writers = [(e["epoch_claimed"], e["node"]) for e in events(folder, "coordinates")]
    assert len({epoch for epoch, _ in writers}) == len(writers), "one writer an epoch"
    assert read_state(folder).writer == second.writer in survivors
    assert cancel(folder).state == "cancelled"


def test_options_of_elastic_runs_are_refused_elsewhere(runs):
    with pytest.raises(OrchError, match="spare_nodes is for elastic runs"):
        submit(sized(2), runs, backend={"options": {"spare_nodes": 1}})
