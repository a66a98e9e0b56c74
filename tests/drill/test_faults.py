"""Tests which fault hits whom, and what a run cannot spare."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.drill import node_faults
from orchestrator.drill.faults import (
    KINDS,
    POSITIONS,
    Injection,
    check_kinds,
    plan_injections,
    refusal,
    restarts_left,
    victim,
)
from orchestrator.drill.node_faults import NodeProcesses
from orchestrator.drill.trial import Trial, measure, score
from orchestrator.errors import OrchError
from orchestrator.observe.timeline import Event, Step
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import descendants, identity, is_alive
from tests.beds.private_mounts import mount_memory, with_private_mounts
from tests.patience import PATIENCE_S

nodes = st.dictionaries(
    st.sampled_from("abcdefgh"), st.lists(st.integers(0, 30), max_size=3), max_size=6
)


@given(nodes, st.sampled_from(POSITIONS), st.floats(0, 1), st.sampled_from("abcz"))
def test_a_victim_holds_a_rank_and_has_the_position(ranks, position, pick, coordinator):
    target = victim(Injection("kill_worker", position, pick), ranks, coordinator)
    if target is None:
        assert position != "any" or not any(ranks.values())
        return
    node, rank = target
    assert rank in ranks[node]
    if position == "rank0":
        assert rank == 0
    if position == "coordinator":
        assert node == coordinator
    if position == "other":
        assert node != coordinator and 0 not in ranks[node]


def test_a_seed_gives_the_same_drill_and_another_one_another():
    faults = list(KINDS)
    first, again, another = (plan_injections(faults, "any", 30, seed, True) for seed in (7, 7, 8))
    assert first == again != another
    in_turn = plan_injections(["kill_agent", "notice"], "other", 2, 0, False)
    assert [injection.fault for injection in in_turn] == ["kill_agent", "notice"] * 2


def test_a_fault_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(OrchError, match="did you mean 'kill_agent'"):
        check_kinds(["kill_agnet"])


def test_what_would_end_a_run_is_refused():
    free = {"restarts_left": 1, "elastic": True, "spare_nodes": 1}
    assert all(refusal(fault, **free) == "" for fault in KINDS)
    assert "max_restarts is used up" in refusal("kill_worker", **free | {"restarts_left": 0})
    assert "not elastic" in refusal("kill_node", **free | {"elastic": False})
    assert "smallest size" in refusal("partition", **free | {"spare_nodes": 0})
    assert refusal("slow_worker", restarts_left=0, elastic=False, spare_nodes=0) == ""


def test_a_restart_is_taken_from_the_budget_of_its_cause():
    used = {"worker_frozen": 1, "worker_exit": 2, "non_finite": 1}
    assert restarts_left("kill_worker", 5, {}, 4, used) == 1
    assert restarts_left("stop_worker", 5, {"worker_frozen": 1}, 4, used) == 0
    assert restarts_left("kill_worker", 5, {"worker_frozen": 1}, 4, used) == 2, (
        "that one was not of the shared budget"
    )


def a_trial(**fields) -> Trial:
    usual = {
        "fault": "kill_worker",
        "position": "any",
        "node": "a",
        "rank": 0,
        "at": 100.0,
        "epoch": 1,
    }
    return Trial(**usual | fields)


def test_what_a_trial_has_come_to_is_read_from_the_runs_own_records():
    trial = a_trial()
    steps = [Step(1, n, 95.0 + n, 1.0) for n in (1, 2, 3, 4)] + [
        Step(2, n, 103.0 + n, 1.0) for n in (3, 4)
    ]
    marks = [
        Event("worker_ended", 99.0, code=-9),
        Event("worker_ended", 100.1, code=-15, asked=True),
    ]
    measure(trial, steps, [*marks, Event("worker_ended", 100.25, code=-9)])
    assert (trial.noticed_s, trial.stepping_s, trial.lost_steps) == (0.25, 5.0, 2)
    measure(trial, steps, [Event("straggler", 100.1, on="b"), Event("straggler", 102.5, on="a")])
    assert trial.noticed_s == 2.5, "another node's slowness is not this one's"


def test_a_score_counts_what_did_not_go_on():
    trials = [
        a_trial(ok=True, noticed_s=float(n), stepping_s=2.0 * n, lost_steps=0) for n in range(1, 20)
    ]
    (row,) = score([*trials, a_trial(problem="the run has ended")])
    assert (row["trials"], row["recovered"], row["problems"]) == (20, 19, ["the run has ended"])
    assert row["noticed_s"] == {"p50": 10.0, "p95": 19.0, "max": 19.0} and row["lost_steps"] == {
        "p50": 0,
        "max": 0,
    }


@given(st.binary(min_size=1, max_size=64), st.integers(0, 99))
def test_a_flipped_bit_is_one(tmp_path_factory, content, seed):
    folder = tmp_path_factory.mktemp("step-00000001")
    (folder / "rank-00000.safetensors").write_bytes(content)
    path, _ = node_faults.flip_bit(folder, random.Random(seed))
    changed = int.from_bytes(path.read_bytes()) ^ int.from_bytes(content)
    assert changed.bit_count() == 1 and len(path.read_bytes()) == len(content)


def test_a_full_disk_is_one_where_checkpoints_have_a_small_one_of_their_own(tmp_path):
    disk = tmp_path / "checkpoints"
    disk.mkdir()
    assert not node_faults.is_small_disk(disk, tmp_path)  # the run's own disk is nobody's to fill

    def test() -> None:
        mount_memory(disk, "1m")
        (disk / "before").write_bytes(b"x" * 100_000)
        make_room = node_faults.fill(disk)
        with pytest.raises(OSError, match="No space left"):
            (disk / "save").write_bytes(b"x" * 8192)
        make_room()
        make_room()  # may be said twice
        (disk / "save").write_bytes(b"x" * 500_000)
        assert sorted(path.name for path in disk.iterdir()) == ["before", "save"]
        assert node_faults.is_small_disk(disk, tmp_path)

    with_private_mounts(test)


#: An agent with a worker, and that worker with what may run below it: an instance of itself, and a
#: program.
WORKER = """
import os, subprocess, sys, time
if os.fork() == 0:
    open("/proc/self/comm", "w").write("orch-rank-3")
    if os.fork() == 0:
        time.sleep(600)
    below = subprocess.Popen(["sleep", "600"], env=os.environ | {"RANK": "3", "ORCH_EPOCH": "0"})
    print(os.getpid(), flush=True)
    below.wait()
os.wait()
"""


@pytest.mark.process
def test_a_worker_is_hit_and_not_what_it_has_started(tmp_path):
    agent = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        worker = identity(int(agent.stdout.readline()))
        below = [identity(pid) for pid in descendants(worker.pid)]
        assert len(below) == 2
        NodeProcesses(RunFolder(tmp_path), identity(agent.pid)).inject("kill_worker", 3, 0.0, 0.0)
        assert agent.wait(PATIENCE_S) == 0, "the worker was not the one"
        assert not is_alive(worker) and all(map(is_alive, below))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
