"""Decisions after an epoch: the contract's table, and what holds for every combination of ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.faults.policy import (
    MOST_FRUITLESS,
    Budget,
    EpochEnd,
    NodeLoss,
    Request,
    WorkerEnd,
    decide,
    first_cause,
)
from orchestrator.plan.exits import Exit

CANCEL = Request("cancelled", "cancelled by the user")
NOTICE = Request("stopped", "node0: got SIGTERM")


def end(
    *codes: int | tuple[int, bool], lost=(), request=None, new_steps=True, world=None
) -> EpochEnd:
    """One worker a code; (code, True): it had been told to stop."""
    pairs = [code if isinstance(code, tuple) else (code, False) for code in codes]
    ends = tuple(
        WorkerEnd(rank=order, node=f"node{order}", code=code, asked=stop_asked, order=order)
        for order, (code, stop_asked) in enumerate(pairs)
    )
    return EpochEnd(
        0, world or len(ends), ends, tuple(NodeLoss(n, "gone") for n in lost), request, new_steps
    )


@pytest.mark.parametrize(
    ("epoch_end", "budget", "again", "state", "code", "rank"),
    [
        (end(0, 0), Budget(3), False, "done", 0, None),
        (end(0, 1), Budget(3), True, "restarting", 0, 1),
        (end(0, 1), Budget(0), False, "failed", 1, 1),
        (end(0, 1), Budget(3, used=3), False, "failed", 1, 1),
        (end(-9, 75), Budget(0), False, "failed", 1, 0),
        (end(75, -9), Budget(0), False, "failed", 1, 1),  # the peer's 75 was heard first
        (
            end(75, (1, True)),
            Budget(0),
            True,
            "restarting",
            0,
            0,
        ),  # an error after being told explains nothing
        (end(75, 75), Budget(0), True, "restarting", 0, 0),
        (end(65, 75), Budget(3), False, "failed", 65, 0),
        (end((-15, True), 78), Budget(3), False, "failed", 78, 1),
        (end(70, 0), Budget(1, used=1), False, "failed", 70, 0),
        (end(70, 0), Budget(1), True, "restarting", 0, 0),
        (end(74, 75), Budget(3), False, "failed", 74, 0),
        (end(77), Budget(3), False, "failed", 77, 0),
        (end(75, lost=["node1"], world=2), Budget(3), False, "failed", 76, None),
        (end((75, True), (75, True), request=CANCEL), Budget(0), False, "cancelled", 75, None),
        (end((75, True), (0, False), request=NOTICE), Budget(0), False, "stopped", 75, None),
        (end((-15, True), (75, True), request=CANCEL), Budget(0), False, "cancelled", 75, 0),
        (end(65, (75, True), request=NOTICE), Budget(0), False, "failed", 65, 0),
        (
            end((75, True), request=NOTICE, lost=["node1"], world=2),
            Budget(0),
            False,
            "stopped",
            75,
            None,
        ),
        (end(request=CANCEL, world=4), Budget(0), False, "cancelled", 75, None),
        (
            end(0, 0, request=CANCEL),
            Budget(0),
            False,
            "done",
            0,
            None,
        ),  # it was done before it heard
        (end(75, new_steps=False), Budget(0, fruitless=MOST_FRUITLESS), False, "stopped", 75, 0),
    ],
)
def test_table(epoch_end, budget, again, state, code, rank):
    decision = decide(epoch_end, budget)
    assert (decision.again, decision.state, decision.code) == (again, state, code)
    if rank is not None:
        assert decision.cause.rank == rank


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ((75, (3, True)), "rank 1 on node1 was asked to save and failed: exit code 3"),
        (((1, True), (75, True)), "rank 0 on node0 was asked to save and failed: user code failed"),
        (
            ((-11, True), (-15, True)),
            "rank 0 on node0 was asked to save and failed: killed by SIGSEGV",
        ),
        ((1, (75, True)), "node0: got SIGTERM; rank 0 on node0 failed: user code failed"),
        (((-9, True), (75, True)), "not every worker saved"),  # it took longer than its grace
        (((-15, True), (75, True)), "not every worker saved"),  # it knows nothing of signals
        (((75, True), (75, True)), NOTICE.reason),
    ],
)
def test_a_worker_that_fails_after_it_was_asked_to_save_is_named(ends, reason):
    decision = decide(end(*ends, request=NOTICE), Budget(3))
    assert (decision.state, decision.code, decision.exclude) == ("stopped", Exit.RESTART, None)
    assert decision.reason.endswith(reason)


CODES = st.sampled_from([0, 0, 1, 3, 64, 65, 70, 74, 75, 75, 76, 77, 78, 127, -6, -9, -11, -15])


@given(
    st.lists(st.tuples(CODES, st.booleans()), min_size=1, max_size=8),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_every_end_has_an_answer_and_budgets_only_shrink(codes, max_restarts, used):
    epoch_end = end(*codes)
    decision = decide(epoch_end, Budget(max_restarts, used))
    assert decision.state in ("restarting", "done", "failed", "stopped")
    assert decision.again == (decision.state == "restarting")
    assert (decision.code == 0) == (decision.again or decision.state == "done")
    assert decision.budget.used - used == int(decision.counted)
    assert decision.budget.used <= max(max_restarts, used)
    if decision.state == "done":
        assert all(code == 0 for code, _ in codes)
    if not decision.again and decision.state == "failed":
        assert decision.code in [int(code) for code in Exit] and decision.cause is not None


@given(st.lists(st.tuples(CODES, st.booleans()), min_size=1, max_size=8), st.randoms())
def test_a_worker_that_failed_by_itself_is_blamed_whatever_was_heard_first(codes, random):
    codes = [*codes, (-9, False)]
    random.shuffle(codes)
    cause = first_cause(end(*codes).ends)
    assert not cause.asked and cause.code not in (0, 75)


def test_restarting_for_ever_without_a_step_ends():
    budget = Budget(0)
    for _ in range(MOST_FRUITLESS):
        decision = decide(end(75, new_steps=False), budget)
        assert decision.again
        budget = decision.budget
    assert not decide(end(75, new_steps=False), budget).again
    assert decide(end(75, new_steps=True), budget).budget.fruitless == 0


# ------------------------------------------------------------------------------------------ elastic
#     runs


def elastic(*ends: WorkerEnd, **fields) -> EpochEnd:
    return EpochEnd(epoch=0, world_size=2, ends=ends, elastic=True, **fields)


def test_an_elastic_run_goes_on_without_a_lost_node_and_pays_nothing():
    lost = (NodeLoss("node1", "connection closed"),)
    decision = decide(elastic(WorkerEnd(0, "node0", 75, True, 0), lost=lost), Budget(0))
    assert (decision.again, decision.counted, decision.cause.kind) == (True, False, "node_lost")
    cancellation = decide(elastic(lost=lost, request=Request("cancelled", "enough")), Budget(0))
    assert (cancellation.again, cancellation.state) == (False, "cancelled")


def test_a_sick_node_is_excluded_where_the_run_can_go_on_without_it():
    sick = WorkerEnd(1, "node1", 74, False, 0)
    decision = decide(elastic(sick, WorkerEnd(0, "node0", 75, True, 1)), Budget(0))
    assert (decision.again, decision.exclude, decision.counted) == (True, "node1", False)
    fixed = decide(EpochEnd(epoch=0, world_size=1, ends=(sick,)), Budget(3))
    assert (fixed.again, fixed.code) == (False, 74)


def test_a_resize_is_no_failure_unless_a_worker_fails_by_itself():
    saved = WorkerEnd(0, "node0", 75, True, 0)
    killed = WorkerEnd(1, "node1", -9, True, 1)  # it had no answer to SIGTERM
    decision = decide(elastic(saved, killed, resize="growing"), Budget(0))
    assert (decision.again, decision.counted, decision.reason, decision.cause) == (
        True,
        False,
        "growing",
        None,
    )
    crashed = WorkerEnd(1, "node1", 1, False, 1)
    decision = decide(elastic(saved, crashed, resize="growing"), Budget(0))
    assert (decision.again, decision.state, decision.cause.rank) == (False, "failed", 1)
    done = WorkerEnd(0, "node0", 0, False, 0), WorkerEnd(1, "node1", 0, False, 1)
    assert decide(elastic(*done, resize="growing"), Budget(0)).state == "done"
