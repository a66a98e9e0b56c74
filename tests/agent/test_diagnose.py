"""Who holds a run up, who is slow, and whom repeated faults speak against: the rules, without
processes."""

from __future__ import annotations

import itertools
import os
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.agent.faults.attribution import FaultHistory, attribute
from orchestrator.agent.faults.detector import HangDetector
from orchestrator.agent.faults.diagnosis import diagnose, hang_timeout_s, peer_medians_s, slowdown
from orchestrator.agent.faults.policy import Budget, EpochEnd, WorkerEnd, decide
from orchestrator.agent.node.progress import ProgressMonitor
from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan.worker import ProgressReport, StepReport
from orchestrator.run.processes import Load
from orchestrator.run.request import Policy
from orchestrator.run.state import Cause
from tests.beds.plans import make_plan

PLAN = make_plan(dp=4, nodes=2)
RULES = Policy(max_restarts=3, grace_s=5, heartbeat_timeout_s=10, join_timeout_s=30)
USUAL = {"usual_step_s": 0.5, "silent_s": 0.5, "step_s": 40.0, "still_s": 40.0, "state": "S"}


def waits(rank: int, **fields) -> WorkerStatus:
    fields = {"step": 9, "phase": "comm", "waiting": "all-reduce (dp)"} | USUAL | fields
    return WorkerStatus(rank=rank, **fields)


def works(rank: int, **fields) -> WorkerStatus:
    fields = {"step": 9, "phase": "backward"} | USUAL | fields
    return WorkerStatus(rank=rank, **fields)


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        (works(2, busy=0.98), "worker_spinning"),
        (works(2, busy=0.1, state="R"), "worker_spinning"),  # the machine is full
        (works(2), "worker_stuck"),
        (
            waits(2, silent_s=39.0, state="D"),
            "worker_stuck",
        ),  # it was waiting when it was last heard
        (
            works(2, stopped_s=2.0, state="T", step_s=1.0, still_s=1.0),
            "worker_frozen",
        ),  # needs no patience
    ],
)
def test_the_one_that_the_others_wait_for(odd, kind):
    diagnosis = diagnose(PLAN, [waits(0), waits(1), odd, waits(3)], RULES)
    assert (diagnosis.kind, diagnosis.rank, diagnosis.node, diagnosis.step) == (kind, 2, "node1", 8)
    assert diagnosis.text.startswith("rank 2 on node1 (gpu 0) ") and "of step 9" in diagnosis.text


def test_nobody_is_blamed_for_a_wait_of_all():
    diagnosis = diagnose(PLAN, [waits(0), waits(1), waits(2, waiting="send (pp)"), waits(3)], RULES)
    assert (diagnosis.kind, diagnosis.rank, diagnosis.node) == ("collective_hung", None, None)
    assert (
        "rank 0, 1, 3 in all-reduce (dp) of step 9; rank 2 in send (pp) of step 9" in diagnosis.text
    )


@given(
    st.lists(st.floats(0, 29), min_size=4, max_size=4),
    st.floats(0.01, 2.9),
    st.sampled_from(["forward", "checkpoint", "start"]),
)
def test_no_rank_is_judged_while_one_of_them_gets_on(ages, usual, phase):
    """Whatever else they look like: within the patience nothing is wrong."""
    seen = [
        works(r, step_s=age, still_s=age, usual_step_s=usual, phase=phase)
        for r, age in enumerate(ages)
    ]
    assert diagnose(PLAN, seen, RULES) is None
    old = [structs.replace(status, step_s=1e4) for status in seen]
    assert diagnose(PLAN, [*old[:3], seen[3]], RULES) is None
    assert diagnose(PLAN, old, RULES) is not None


def test_patience_grows_with_the_step_and_with_what_has_no_usual_length():
    assert hang_timeout_s([works(0)], RULES) == 30.0
    assert hang_timeout_s([works(0, usual_step_s=60.0)], RULES) == 600.0
    assert hang_timeout_s([works(0, usual_step_s=None), works(1)], RULES) == 1800.0
    assert hang_timeout_s([works(0), works(1, phase="checkpoint")], RULES) == 1800.0
    assert hang_timeout_s([works(0), works(1, phase="checkpoint", limit_s=60.0)], RULES) == 30.0


def test_programs_without_progress_reports_are_not_judged():
    assert diagnose(PLAN, [waits(0), works(1, silent_s=None)], RULES) is None
    assert diagnose(PLAN, [], RULES) is None
    program = structs.replace(PLAN, program=True)
    assert diagnose(program, [works(0, silent_s=None), works(1, silent_s=None)], RULES) is None


@pytest.mark.parametrize("unheard", [{"silent_s": None}, {"step": 0}])
def test_ranks_of_a_program_that_report_no_steps_keep_no_hang_and_are_not_blamed(unheard):
    """Found in a reading: where rank 0 reports for all there was no verdict at all, or one about a
    rank that was innocent."""
    program = structs.replace(PLAN, program=True)
    others = [works(rank, usual_step_s=None, step_s=1900.0, **unheard) for rank in (1, 2, 3)]
    assert diagnose(program, [works(0, step_s=1700.0), *others], RULES) is None
    diagnosis = diagnose(program, [works(0, step_s=1900.0), *others], RULES)
    assert (diagnosis.kind, diagnosis.rank) == ("collective_hung", None)
    assert "rank 1, 2, 3 reports no steps, so the rank at fault is unknown" in diagnosis.text


def test_who_waits_for_a_rank_that_has_ended_is_not_blamed():
    """The others may be saving the result, so they have as long as a start."""
    program = structs.replace(PLAN, program=True)
    assert diagnose(program, [works(0), works(1)], RULES, ended_ranks=[3, 2]) is None
    late = [works(0, step_s=1900.0), works(1, step_s=1900.0)]
    diagnosis = diagnose(program, late, RULES, ended_ranks=[3, 2])
    assert diagnosis.rank is None and "rank 2, 3 ended before the others" in diagnosis.text


@pytest.mark.parametrize("program", [False, True])
def test_a_phase_with_a_limit_is_waited_for_and_then_at_fault(program):
    """A program reports from no thread of its own: its ranks that wait are silent."""
    plan = structs.replace(PLAN, program=program)
    late = {"step_s": 500.0, "still_s": 500.0}
    silent_s = 500.0 if program else 0.5
    peers = [
        waits(0, silent_s=silent_s, **late),
        works(1, **late),  # a program need not say that it waits
        waits(3, silent_s=silent_s, **late),
    ]
    saves = works(2, phase="save", limit_s=100.0, step_s=500.0, still_s=99.0)
    assert diagnose(plan, [*peers, saves], RULES) is None
    diagnosis = diagnose(plan, [*peers, structs.replace(saves, still_s=101.0)], RULES)
    assert (diagnosis.kind, diagnosis.rank) == ("worker_stuck", 2)
    assert ", in save" in diagnosis.text


def test_a_program_s_ranks_that_all_wait_are_not_blamed_for_their_silence():
    silent = [waits(rank, silent_s=40.0) for rank in range(4)]
    assert diagnose(PLAN, silent, RULES).kind == "worker_stuck"
    program = structs.replace(PLAN, program=True)
    assert diagnose(program, silent, RULES).kind == "collective_hung"


def slow_nodes(plan, seen, ratio=1.5):
    peers = peer_medians_s(plan, seen)
    by_node = {
        rank.node: [status for status in seen if plan.ranks[status.rank].node == rank.node]
        for rank in plan.ranks
    }
    slowdowns = {node: slowdown(plan, theirs, peers, ratio) for node, theirs in by_node.items()}
    return {node: ratio for node, ratio in slowdowns.items() if ratio is not None}


@given(st.data())
def test_what_is_usual_for_a_nodes_peers_is_the_median_of_the_others_of_that_stage(data):
    plan = data.draw(
        st.sampled_from(
            [make_plan(dp=4, nodes=2), make_plan(pp=2, dp=4, nodes=4), make_plan(tp=2, dp=4)]
        )
    )
    times = st.none() | st.sampled_from([0.1, 0.2, 0.2, 0.3, 0.5, 0.7])
    seen = [
        WorkerStatus(rank=rank.rank, usual_step_s=1.0, usual_own_s=data.draw(times))
        for rank in plan.ranks
    ]
    peers = {}
    for node, stage in {(rank.node, rank.coord.pp) for rank in plan.ranks}:
        peer_s = [
            status.usual_own_s
            for status in seen
            if status.usual_own_s is not None
            and plan.ranks[status.rank].node != node
            and plan.ranks[status.rank].coord.pp == stage
        ]
        statuses = [
            status
            for status in seen
            if status.usual_own_s is not None and plan.ranks[status.rank].node == node
        ]
        if peer_s and any(plan.ranks[status.rank].coord.pp == stage for status in statuses):
            peers[node, stage] = statistics.median(peer_s)
    assert peer_medians_s(plan, seen) == pytest.approx(peers)


def test_slow_is_who_computes_longer_than_its_peers_of_the_same_stage():
    plan = make_plan(pp=2, dp=2, nodes=4)
    stage = {rank.rank: rank.coord.pp for rank in plan.ranks}
    own_s = {
        rank: 0.2 + 0.3 * stage[rank] for rank in range(4)
    }  # the last stage has more to do, and nobody is slow
    seen = [WorkerStatus(rank=rank, usual_step_s=1.0, usual_own_s=own_s[rank]) for rank in range(4)]
    assert slow_nodes(plan, seen) == {}
    slow = structs.replace(seen[0], usual_own_s=0.4)
    assert slow_nodes(plan, [slow, *seen[1:]]) == {plan.ranks[0].node: 2.0}
    assert slow_nodes(plan, [structs.replace(slow, usual_step_s=9.0), *seen[1:]]) == {}, (
        "it costs nobody anything"
    )


def test_who_takes_more_micro_batches_is_not_slow():
    for zero, own_s in (
        (1, [0.4, 0.2, 0.2]),
        (2, [0.4, 0.4, 0.4]),
    ):  # with ZeRO-2 all compute equally many
        plan = make_plan(dp=3, nodes=3, zero=zero, replica_micro_batches=[2, 1, 1])
        seen = [works(rank, usual_own_s=seconds) for rank, seconds in enumerate(own_s)]
        assert slow_nodes(plan, seen) == {}
        seen[1] = works(1, usual_own_s=2 * own_s[1])
        assert slow_nodes(plan, seen) == {"node1": 2.0}


def test_a_slow_node_is_told_once_when_it_is_sure_and_once_when_it_is_over():
    lookout = HangDetector(RULES)
    announcements = []
    lasting = []
    lookout.begin_epoch(PLAN)
    for second in range(30):
        slow = 0.9 if second < 12 or second == 14 else 0.3  # and once more, which is no news
        for node, ranks in (("node0", (0, 1)), ("node1", (2, 3))):
            seen = [
                WorkerStatus(rank=r, usual_step_s=1.0, usual_own_s=slow if r == 3 else 0.3)
                for r in ranks
            ]
            lookout.add_report(node, seen, float(second))
        lookout.diagnosis(float(second))
        if (news := lookout.new_stragglers()) is not None:
            announcements.append((second, news))
        lasting.append(lookout.lastingly_slow())
    assert announcements == [(2, {"node1": 3.0}), (18, {})]
    assert lasting == [{}] * 10 + [{"node1": 3.0}] * 8 + [{}] * 12
    lookout.add_report("node1", [WorkerStatus(rank=3, usual_step_s=1.0, usual_own_s=0.9)], 30.0)
    assert lookout.new_stragglers() is None, "one slow word is none"


def test_a_monitor_counts_its_own_looks_and_a_step_is_newer_than_the_report_before_it():
    monitor = ProgressMonitor()
    pids = {3: os.getpid()}
    report = ProgressReport(
        rank=3, epoch=0, step=5, phase="forward\x1b[31m", waiting="x" * 999, moves=1
    )
    monitor.on_progress(report)
    for _ in range(4):
        monitor.on_progress(report)
        (seen,) = monitor.look(pids)
    assert (seen.still_s, seen.step_s, seen.silent_s, seen.step) == (2.0, 2.0, 0.5, 5)
    assert seen.phase == "forward?[31m" and len(seen.waiting) == 120, (
        "a worker's word does not rule the terminal"
    )
    fields = {"samples": 1, "tokens": 1, "step_s": 0.5}
    monitor.on_step(StepReport(rank=3, epoch=0, step=5, **fields))
    monitor.on_step(StepReport(rank=3, epoch=0, step=6, **fields))
    for _ in range(9):  # once more, with other values
        monitor.on_step(StepReport(rank=3, epoch=0, step=6, **fields | {"step_s": 0.001}))
    (seen,) = monitor.look(pids)
    assert (seen.step, seen.phase, seen.waiting, seen.still_s, seen.usual_step_s) == (
        7,
        "",
        None,
        0.5,
        0.5,
    )


@pytest.mark.parametrize("phase", ["save", "checkpoint"])
def test_the_step_after_a_long_save_is_not_late_at_once(phase):
    """On a busy machine the rank that had saved for 14 seconds was at fault half a second later."""
    monitors = [ProgressMonitor(), ProgressMonitor()]
    fields = {"epoch": 0, "samples": 1, "tokens": 1, "step_s": 0.5}
    for rank, monitor in enumerate(monitors):
        for step in range(2, 8):
            monitor.on_step(StepReport(rank=rank, step=step, **fields))

    def diagnosis_after(seconds: int, phase: str, limit_s: float | None = None):
        """Of seconds in which rank 0 is in a phase and rank 1 waits for it."""
        saver = {"rank": 0, "phase": phase, "limit_s": limit_s}
        waiter = {"rank": 1, "phase": "comm", "waiting": "all-reduce"}
        for _ in range(2 * seconds):
            statuses = []
            for rank, report in enumerate((saver, waiter)):
                monitors[rank].on_progress(ProgressReport(epoch=0, step=8, **report))
                statuses += monitors[rank].look({rank: os.getpid()})
        return diagnose(PLAN, statuses, RULES)

    limit_s = 900.0 if phase == "save" else None
    assert diagnosis_after(600, phase, limit_s) is None
    assert diagnosis_after(20, "forward") is None
    assert diagnosis_after(20, "forward").rank == 0


@pytest.mark.parametrize("sign", ["none", "computes", "speaks"])
def test_who_is_stopped_and_let_go_in_turn_is_slow_and_not_frozen(monkeypatch, sign):
    """Found in trials: a worker that ran half of the time was stopped at four looks in a row, and
    was killed for it."""
    seconds = itertools.count(1.0)
    monkeypatch.setattr(
        "orchestrator.agent.node.progress.load_of",
        lambda _: Load("T", next(seconds) if sign == "computes" else 1.0),
    )
    monitor = ProgressMonitor()
    report = ProgressReport(rank=3, epoch=0, step=5, phase="forward", waiting=None)
    monitor.on_progress(report)
    for _ in range(8):
        if sign == "speaks":
            monitor.on_progress(report)
        (seen,) = monitor.look({3: os.getpid()})
    assert seen.stopped_s == (4.0 if sign == "none" else 0.5) and seen.is_frozen == (sign == "none")


# ------------------------------------------------------------------------------------------ faults
#     that come again


def failed(node: str, step: int | None, kind: str = "worker_exit", code: int = 1) -> Cause:
    return Cause(
        kind=kind, text=f"rank on {node}", epoch=0, node=node, rank=0, code=code, step=step
    )


@pytest.mark.parametrize(
    ("past", "last", "at_fault"),
    [
        ([failed("a", 7)], failed("b", 7), "data"),
        ([failed("a", 7), failed("b", 3)], failed("c", 7), "data"),
        ([failed("a", 7, code=-11)], failed("b", 7, code=-11), "data"),
        ([failed("a", 7, code=-9)], failed("b", 7, code=-9), ""),  # somebody kills them
        ([failed("a", 7)], failed("b", 7, code=-9), ""),
        ([failed("a", None)], failed("b", None), ""),  # nothing is known of where
        ([failed("a", 7)], failed("a", 7), ""),
        ([failed("a", 7, "non_finite")], failed("a", 7, "non_finite"), "data"),
        (
            [failed("a", 7, "non_finite")],
            failed("a", 8, "non_finite"),
            "",
        ),  # a passing error of a machine
        ([failed("a", 1), failed("a", 2)], failed("a", 3), "node"),
        (
            [failed("a", 1), failed("a", 2, "worker_stuck", -9)],
            failed("a", 3, "worker_spinning", -9),
            "node",
        ),
        ([failed("a", 1), failed("b", 2)], failed("a", 3), ""),
        ([failed("a", 2), failed("a", 2)], failed("a", 2), ""),  # the step may be at fault as well
        ([failed("a", 1, code=-9), failed("a", 2, code=-9)], failed("a", 3, code=-9), ""),
        ([failed("a", 1, "worker_frozen", -9)] * 3, failed("a", 3, "worker_frozen", -9), ""),
        ([failed("a", 1), failed("a", 2, "node_lost")], failed("a", 3), ""),
    ],
)
def test_what_repeats(past, last, at_fault):
    def found(**rules: int) -> str:
        return attribute(last, FaultHistory(tuple(past), **rules)).at_fault

    assert found(nodes=3, bad_node_after=3) == at_fault
    assert found(nodes=1, bad_node_after=3) in ("", at_fault if at_fault == "data" else "")
    if at_fault == "node":
        assert not found(nodes=3, bad_node_after=0)


def test_a_cause_with_a_budget_of_its_own_uses_up_no_other():
    budget = Budget(max_restarts=1, limits={"worker_frozen": 2})
    frozen, exit_ = (
        EpochEnd(0, 1, (WorkerEnd(0, "a", -9, False, 0),), fault=fault)
        for fault in (Cause(kind="worker_frozen", text="frozen", epoch=0, node="a", rank=0), None)
    )
    for end, again in (
        (frozen, True),
        (exit_, True),
        (frozen, True),
        (frozen, False),
        (exit_, False),
    ):
        decision = decide(end, budget)
        assert decision.again == again
        budget = decision.budget
    assert (budget.used, dict(budget.by_cause)) == (3, {"worker_frozen": 2, "worker_exit": 1})
    assert decide(frozen, budget).reason == "frozen; max_restarts_by_cause.worker_frozen=2 used up"
