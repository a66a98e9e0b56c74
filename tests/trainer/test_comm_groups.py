"""How groups come into being on NCCL: each is split from a larger one, in which all ranks do the
same in step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cost.memory.communicators import Group, Use, communicators
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_mesh import nvlink_domain_of
from tests.beds.plans import make_plan
from tests.trainer.samples import small
from trainer.comm import mesh
from trainer.comm.connect import ranks_per_root
from trainer.comm.mesh import GROUPS, PARENTS, Mesh, groups_used

PLANS = {
    "five axes": {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "zero": 1},
    "four stages, replicated heads": {"tp": 4, "pp": 4, "dp": 2, "zero": 1},
    "hybrid shards": {"dp": 8, "zero": 3, "zero_group": 2},
    "two copies": {"pp": 4, "dp": 2, "schedule": "dualpipe", "micro_batches": 4},
}


def splits(plan, monkeypatch):
    """Each rank's calls: (members of the parent, the split's name, its ranks)."""
    calls = {}
    for rank in range(plan.parallel.world_size):
        rank_calls = calls[rank] = []

        def split_group(parent, ranks, name, timeout, urgent, rank_calls=rank_calls, rank=rank):
            inside = tuple(range(plan.parallel.world_size)) if parent is None else parent
            assert rank in inside and set(ranks) <= set(inside), (
                "a group is split from one that holds it"
            )
            rank_calls.append((inside, name, tuple(ranks)))
            return tuple(ranks) if rank in ranks else None

        monkeypatch.setattr(mesh, "split_group", split_group)
        Mesh.from_plan(plan, rank, split=True)
    return calls


@pytest.mark.parametrize("degrees", PLANS.values(), ids=PLANS)
def test_all_members_of_a_parent_split_it_together(degrees, monkeypatch):
    plan = make_plan(**degrees, model=small(kv_heads=2, layers=4, tied_embeddings=True))
    calls = splits(plan, monkeypatch)
    for rank, rank_calls in calls.items():
        for inside, name, ranks in rank_calls:
            for member in inside:
                member_splits = [
                    (split_name, theirs) for at, split_name, theirs in calls[member] if at == inside
                ]
                rank_splits = [
                    (split_name, theirs) for at, split_name, theirs in rank_calls if at == inside
                ]
                assert [split_name for split_name, _ in member_splits] == [
                    split_name for split_name, _ in rank_splits
                ], "in one order, by each of its members"
            if rank in ranks:
                assert all((inside, name, ranks) in calls[member] for member in ranks)
        assert len(rank_calls) <= len({name for _, name, _ in rank_calls}), "no group is made twice"


def test_only_groups_that_the_plan_uses_are_made(monkeypatch):
    plan = make_plan(cp=2, dp=2, model=small(tied_embeddings=False))
    names = {name for _, name, _ in splits(plan, monkeypatch)[0]}
    assert names == {"cp", "grad"}, (
        "dp alone sums nothing here, and equal members share a communicator"
    )
    with pytest.raises(KeyError, match=r"dp: not among the groups of this plan"):
        monkeypatch.setattr(mesh, "split_group", lambda *_, **__: object())
        Mesh.from_plan(plan, 0, split=True).group("dp")
    assert set(groups_used(make_plan(ep=2, dp=2))) >= {"experts", "expert_grad", "expert_model"}


def test_what_computation_waits_for_shares_no_communicator_with_gradients(monkeypatch):
    """Operations of a communicator run one after the other: the keys of the next layer would wait
    for the gradients of the last one. The norm of gradients, at the end, shares theirs."""
    for degrees, names in (
        ({"cp": 4}, {"cp", "grad"}),
        ({"ep": 4}, {"experts", "grad"}),
        ({"tp": 4}, {"tp"}),
    ):
        moe = Moe(experts=8, top_k=2, ffn_hidden=8) if "ep" in degrees else None
        plan = make_plan(**degrees, model=small(kv_heads=4, moe=moe))
        assert {name for _, name, _ in splits(plan, monkeypatch)[0]} == names


def test_a_parent_is_made_before_its_children():
    assert all(GROUPS.index(parent) < GROUPS.index(child) for child, parent in PARENTS.items())


def test_reads_of_roots_grow_linearly():
    """Each of n ranks reads the address of each root of NCCL's start."""
    roots = {world: -(-world // ranks_per_root(world)) for world in (8, 1024, 16384, 131072)}
    assert roots == {8: 1, 1024: 8, 16384: 64, 131072: 64}


EXPERTS = {
    "experts": {"tp": 2, "ep": 2, "dp": 2, "zero": 1},
    "experts over all nodes": {"ep": 8, "pp": 2, "dp": 2, "zero": 1},
    "experts over cp and tp": {"tp": 4, "cp": 2, "ep": 2, "dp": 2, "etp": 2, "fold_cp": True},
    "experts, hybrid shards": {"ep": 2, "dp": 8, "zero": 1, "zero_group": 4},
    "experts by domain": {"ep": 8, "dp": 2, "expert_all_to_all": "hierarchical"},
}


LAYOUTS = (
    PLANS
    | EXPERTS
    | {
        "two stages, tied": {"pp": 2, "dp": 2},
        "two stages, two copies": {"pp": 2, "dp": 2, "schedule": "dualpipe", "micro_batches": 4},
        "experts, two copies": {"ep": 2, "pp": 4, "schedule": "dualpipe", "micro_batches": 4},
        "experts, shards of as many": {"ep": 2, "dp": 4, "zero": 1, "zero_group": 2},
        "experts over cp, all-gather": {
            "cp": 2,
            "dp": 2,
            "fold_cp": True,
            "cp_method": "allgather",
        },
        "experts over cp, ulysses": {"cp": 4, "dp": 2, "fold_cp": True, "cp_method": "ulysses"},
        "cp alone": {"cp": 4},
        "ep over all": {"ep": 4, "dp": 2},
        "tp over all": {"tp": 8},
        "hybrid shards across cp": {"cp": 2, "dp": 6, "zero": 1, "zero_group": 4},
        "a hybrid shard of one and a half cp": {
            "cp": 2,
            "pp": 2,
            "dp": 3,
            "zero": 1,
            "zero_group": 3,
        },
    }
)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("degrees", LAYOUTS.values(), ids=LAYOUTS)
def test_the_plan_counts_the_memory_of_these_groups(degrees, nodes, monkeypatch):
    moe = Moe(experts=8, top_k=2, ffn_hidden=8) if {"ep", "fold_cp"} & degrees.keys() else None
    model = small(kv_heads=2, layers=4, tied_embeddings=True, moe=moe)
    plan = make_plan(**degrees, model=model, nodes=nodes)
    domains = nvlink_domain_of(plan)
    monkeypatch.setattr(mesh, "split_group", lambda parent, ranks, *_, **__: [*ranks])
    groups = Mesh.from_plan(plan, 0, split=True).groups
    made = dict[int, Group]()
    for name, ranks in groups.items():
        if name == "experts" and "experts_inside" in groups:
            continue  # messages go by domain
        near = sum(domains[rank] == domains[0] for rank in ranks)
        made[id(ranks)] = Group(len(ranks), near)
    workload = Workload(plan.model, plan.parallel, plan.job.train)
    planned = Counter(use.group for use in communicators(workload, plan.cluster))
    assert planned == Counter(made.values())


MOE = Moe(experts=8, top_k=2, ffn_hidden=8)
SEQUENCES = structs.replace(MOE, capacity_factor=1.0)
ULYSSES = {"cp": 4, "cp_method": "ulysses"}
#: Layout, changes of the model -> (ranks, whether they gather and sum, peers of transfers) of each
#: communicator.
USES = {
    "arriving tokens are gathered over tp, uneven": (
        {"tp": 2, "ep": 2},
        {"moe": MOE},
        [(2, False, 1), (2, True, 0), (2, True, 1), (4, True, 0)],
    ),
    "tokens are gathered before they leave": (
        {"tp": 2, "ep": 2, "sp": False},
        {"moe": MOE},
        [(2, False, 1), (2, True, 0), (2, True, 0), (4, True, 0)],
    ),
    "a ring": ({"cp": 4}, {}, [(4, False, 1), (4, True, 0)]),
    "a ring, choices by sequence": (
        {"cp": 4},
        {"moe": SEQUENCES},
        [(4, True, 0), (4, True, 1)],
    ),
    "ulysses": (ULYSSES, {}, [(4, False, 3), (4, True, 0)]),
    "ulysses, dropout": (ULYSSES, {"dropout": 0.1}, [(4, True, 0), (4, True, 3)]),
}


@pytest.mark.parametrize(("degrees", "changes", "expected"), USES.values(), ids=USES)
def test_the_plan_counts_what_each_group_does(degrees, changes, expected):
    model = small(kv_heads=4, layers=4, **changes)
    plan = make_plan(**degrees, model=model)
    workload = Workload(plan.model, plan.parallel, plan.job.train)
    uses = communicators(workload, plan.cluster)
    assert sorted((use.group.ranks, use.collects, use.peers) for use in uses) == expected


@given(
    directions=st.lists(st.tuples(st.integers(1, 3), st.integers(2, 4)), min_size=1, max_size=3),
    domain=st.integers(1, 40),
    size=st.integers(1, 8),
)
def test_the_members_of_a_group_are_counted_as_if_they_were_listed(directions, domain, size):
    grid = []
    ranks = [0]
    distance = 1
    for gap, count in directions:
        distance *= gap
        grid.append((distance, count))
        ranks = [start * distance + rank for start in range(count) for rank in ranks]
        distance *= count
    positions = (None, range(len(ranks))[:size], range(0, len(ranks), size))
    for chosen in positions:
        members = ranks if chosen is None else [ranks[position] for position in chosen]
        near = sum(rank < domain for rank in members)
        use = Use("gradients", tuple(grid), positions=chosen)
        assert use.group(domain) == Group(len(members), near)
