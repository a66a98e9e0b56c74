"""Faults of workers in whole local runs: found, the culprit named, its stack saved, and the run
goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.backends.local.backend import LocalBackend
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import read_state
from tests.beds.bundles import events, submit, wait_end, wait_for
from tests.beds.plans import make_plan

pytestmark = pytest.mark.process


def start(runs, wishes: dict[str, object], **backend) -> RunFolder:
    fields = {"hang_after_s": 20.0, "max_restarts": 9} | backend
    wishes = {"MEET": 1} | wishes
    return submit(make_plan(dp=4, nodes=2), runs, backend=fields, **wishes)


@pytest.mark.slow
def test_each_way_to_stand_still_is_told_from_the_others(runs):
    """One run, a fault an epoch: what it was, who it was, and where it stood.

    Ranks that a busy machine leaves without a step for two seconds may cost an epoch more: each
    fault waits its turn.
    """
    faults = {
        "worker_spinning": ("1:5:spin:0", 1, "node0", 4, "computes"),
        "worker_stuck": ("2:6:stuck:1", 2, "node1", 5, "neither computing nor waiting, state S"),
        "collective_hung": ("0:5:apart:2", None, None, 4, "every rank waits for another"),
        "worker_frozen": ("3:7:stopped:3", 3, "node1", 6, "stopped by a signal (state T) for 2 s"),
    }
    held = "0:4:held:4"
    hangs = ",".join([order for order, *_ in faults.values()] + [held])
    folder = start(runs, {"HANG": hangs, "STEPS": 9}, hang_after_s=2.0, max_restarts=99)
    state = wait_end(folder)
    every = [epoch.cause for epoch in state.epochs if epoch.cause]
    assert (state.state, state.restarts, state.epoch) == ("done", len(every), len(every)), (
        state.reason
    )
    hung = [int((folder.path / f"hung-{turn}").read_text()) for turn in range(5)]
    causes = [state.epochs[epoch].cause for epoch in hung]
    for cause, (kind, (_, rank, node, step, phrase)) in zip(causes, faults.items(), strict=False):
        assert (cause.kind, cause.rank, cause.node, cause.step) == (kind, rank, node, step), cause
        assert phrase in cause.text
    assert (causes[4].kind, causes[4].rank, causes[4].node) == ("worker_spinning", 0, "node0"), (
        causes[4]
    )
    for cause, rank_name in (
        (causes[0], "rank 1 on node0 (gpu 1)"),
        (causes[3], "rank 3 on node1 (gpu 1)"),
    ):
        assert cause.text.startswith(
            f"{rank_name} did not enter all-reduce (dp) of step {cause.step + 1}"
        ), cause
    assert causes[0].tail[-1] == f"orch: {causes[0].text}: killed"
    provoked = Counter([*faults, "worker_spinning"])
    by_cause = Counter(cause.kind for cause in every)
    assert provoked <= by_cause and state.restarts_by_cause == by_cause
    for cause, function in ((causes[0], "in hang"), (causes[1], "in hang"), (causes[4], "in hang")):
        stack = (folder.path / cause.stack).read_text()
        assert stack.startswith(cause.text) and function in stack and "State:\t" not in stack, stack
    assert "State: T (stopped)" in (folder.path / causes[3].stack).read_text()
    stacks = list((folder.path / "stacks").glob(f"epoch-{hung[2]}-*"))
    assert len(stacks) == 4, "where nobody is missing, all are asked"
    assert {oct(path.stat().st_mode & 0o777) for path in (folder.path / "stacks").iterdir()} == {
        "0o600"
    }


def test_a_run_that_only_starts_slowly_or_sends_no_progress_is_left_alone(runs):
    """Before the second step of an epoch nobody knows how long one takes; a worker without progress
    reports is not judged at all.
    """
    limits = {"hang_after_s": 0.5, "hang_after_steps": 0.1}
    folder = start(runs, {"STEPS": 2, "STEP_S": 1.5, "SLOW": "1:2"}, **limits)
    quiet = submit(
        make_plan(dp=2, nodes=1), runs, run_id="quiet", STEPS=3, STEP_S=1.5, backend=limits
    )
    for run_folder in (folder, quiet):
        state = wait_end(run_folder)
        assert (state.state, state.restarts) == ("done", 0), state.reason


def test_a_straggler_is_named_and_those_that_it_holds_up_are_not(runs):
    folder = start(runs, {"STEPS": 1_000_000, "STEP_S": 0.05, "SLOW": "3:3"})
    state = wait_for(lambda: (s := read_state(folder)).slow and s, what="a straggler")
    assert list(state.slow) == ["node1"] and state.slow["node1"] == pytest.approx(3, rel=0.01)
    assert [(e["on"], e["ratio"]) for e in events(folder, "straggler")] == [
        ("node1", pytest.approx(3, rel=0.01))
    ]
    LocalBackend().cancel(folder, force=True)
    wait_end(folder)


def test_budgets_by_cause_and_what_a_worker_says_of_itself(runs):
    says = "1:2:non_finite:0,0:3:non_finite:1"
    folder = start(
        runs, {"STEPS": 5, "SAY": says}, max_restarts=0, max_restarts_by_cause={"non_finite": 1}
    )
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.cause.kind) == ("failed", 65, "non_finite")
    assert (
        state.restarts_by_cause == {"non_finite": 1}
        and "max_restarts_by_cause.non_finite=1 used up" in state.reason
    )
    assert "non_finite at step 3" in state.cause.text


def test_a_full_disk_stops_the_run_and_burns_no_restart(runs):
    state = wait_end(start(runs, {"STEPS": 5, "SAY": "1:2:disk_full:0"}))
    assert (state.state, state.exit_code, state.restarts) == ("stopped", 75, 0)
    assert state.cause.kind == "disk_full" and state.reason.endswith("make room and resume")


def test_a_step_that_fails_on_two_nodes_and_a_node_that_fails_at_other_steps(runs):
    options = {"STEPS": 5, "backend": {"max_restarts": 9}}
    data = submit(make_plan(dp=4, nodes=2), runs, run_id="data", DIE="0:3:1:0,3:3:1:1", **options)
    node = submit(
        make_plan(dp=4, nodes=2), runs, run_id="node", DIE="3:2:1:0,2:3:1:1,3:4:1:2", **options
    )
    state = wait_end(data)
    assert (state.state, state.exit_code, state.restarts) == ("failed", 65, 1)
    assert state.reason.endswith("the same step failed on node0 before: the data or the code")
    state = wait_end(node)
    assert (state.state, state.exit_code, state.restarts) == ("failed", 74, 2)
    assert (
        state.reason.endswith("3 failures in a row on node1, at different steps")
        and "node1" in state.excluded
    )
