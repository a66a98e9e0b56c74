"""Wrong node, wrong plan, swapped ranks: found before step 0, by every rank, in one line with exit
code 65."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan import Exit, Plan
from tests.beds.plans import make_plan
from tests.trainer.workers import worker_env
from trainer.comm.check import WorkerIdentity, check_env, check_peers, find_mismatch, identity_of
from trainer.errors import PlanMismatch
from trainer.verify.ranks import run_ranks

PLAN = make_plan(tp=2, dp=2, nodes=2)


def seats(plan: Plan = PLAN) -> list[WorkerIdentity]:
    return [identity_of(plan, worker_env(plan, rank)) for rank in range(plan.parallel.world_size)]


def test_the_plans_own_seats_agree():
    assert find_mismatch(PLAN, seats()) is None


@pytest.mark.parametrize(
    ("rank", "changes", "fragments"),
    [
        (3, {"node": "node0"}, ["rank 3", "'node0'", "rank 1's place", "'node1'"]),
        (3, {"node": "elsewhere"}, ["rank 3", "'elsewhere'", "no rank's place", "'node1'"]),
        (2, {"local_rank": 1}, ["rank 2", "local rank 1", "rank 3's place", "local rank 0"]),
        (
            1,
            {"assigned_plan": "f" * 64},
            ["rank 1 on 'node0'", "assigned plan ffffffffffff", PLAN.hash[:12]],
        ),
        (
            2,
            {"assigned_plan": "f" * 64, "loaded_plan": "f" * 64},
            ["rank 2 on 'node1'", "ffffffffffff", "rank 0 on 'node0'"],
        ),
        (1, {"epoch": 4}, ["rank 1", "epoch 4", "rank 0", "0"]),
        (1, {"rank": 2}, ["rank 1", "calls itself rank 2"]),
    ],
)
def test_each_contradiction_is_named(rank, changes, fragments):
    table = seats()
    table[rank] = msgspec.structs.replace(table[rank], **changes)
    problem = find_mismatch(PLAN, table)
    assert problem is not None and "\n" not in problem
    assert [fragment for fragment in fragments if fragment not in problem] == []


@given(st.permutations(range(4)))
def test_any_permutation_of_ranks_over_places_is_found(order):
    table = [
        msgspec.structs.replace(seat, node=PLAN.ranks[to].node, local_rank=PLAN.ranks[to].gpu)
        for seat, to in zip(seats(), order, strict=True)
    ]
    assert (find_mismatch(PLAN, table) is None) == (list(order) == [0, 1, 2, 3])


def test_a_rank_that_cannot_join_says_so_alone():
    with pytest.raises(PlanMismatch, match="started for 8 workers, the plan has 4"):
        check_env(PLAN, worker_env(PLAN, 0, world_size=8))
    with pytest.raises(PlanMismatch, match=r"rank 4 .* outside the plan's ranks 0\.\.3"):
        check_env(PLAN, msgspec.structs.replace(worker_env(PLAN, 0), rank=4))


@pytest.mark.process
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({1: {"node": "node1"}}, "rank 1 runs on 'node1'"),
        ({0: {"local_rank": 1}, 1: {"local_rank": 0}}, "rank 0 runs on 'node0' as local rank 1"),
        ({1: {"node": "node1"}, 3: {"node": "node0"}}, "rank 1 runs on 'node1'"),
        ({2: {"plan_hash": "0" * 64}}, "rank 2 on 'node1' was assigned plan 000000000000"),
        ({2: {"epoch": 7}}, "rank 2 on 'node1' is of plan epoch 7"),
        ({2: {"node": "\x01" * 5000}}, "rank 2 runs on"),
        ({2: {"node": "nöde\n$(x)"}}, "rank 2 runs on 'nöde\\n$(x)'"),
    ],
)
def test_all_ranks_reach_the_same_verdict(changes, message):
    def worker(rank: int) -> list:
        try:
            check_peers(PLAN, worker_env(PLAN, rank, **changes.get(rank, {})))
        except PlanMismatch as error:
            return [str(error), int(error.exit)]
        return [None, 0]

    answers = run_ranks(worker, 4)
    assert all(answer == answers[0] for answer in answers)
    if message is None:
        assert answers[0] == [None, 0]
    else:
        assert message in answers[0][0] and answers[0][1] == Exit.CONFIG


@pytest.mark.process
def test_one_rank_with_another_plan_file_is_found_by_all():
    edited = make_plan(tp=2, dp=2, nodes=2, steps=99)

    def worker(rank: int) -> str:
        plan = edited if rank == 3 else PLAN
        try:
            check_peers(plan, worker_env(plan, rank))
        except PlanMismatch as error:
            return str(error)
        return ""

    expected = (
        f"rank 3 on 'node1' has plan {edited.hash[:12]}, rank 0 on 'node0' has {PLAN.hash[:12]}"
    )
    assert run_ranks(worker, 4) == [expected] * 4
