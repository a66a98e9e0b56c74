"""The nodes and the plan that an elastic run goes on with."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cluster.resolve import resolve
from orchestrator.config.compose import load
from orchestrator.plan.batch import taken
from orchestrator.plan.cluster import check_cluster
from orchestrator.plan.codec import plan_hash
from orchestrator.planner.elastic.next_plan import (
    horizon_s,
    larger_plan,
    legal_size,
    next_plan,
    pays,
    restrict,
)
from orchestrator.planner.elastic.sizes import plan_sizes
from orchestrator.planner.placement.rank_assignment import used_nodes


@lru_cache
def sizes(layout: str = "tp8"):
    """Plans of 1 to 8 nodes of 8 GPUs under leaves of four: of 48 samples, which 5 and 7 do not
    divide."""
    overrides = [
        "+cluster=h100x64",
        "model=llama3_8b",
        f"parallel={layout}",
        "nodes=1..8",
        "train.global_batch_samples=48",
    ]
    return {
        size.nodes: size.plan for size in plan_sizes(load(overrides, ranges=True), resolve).legal
    }


@lru_cache
def even():
    """Sizes in which every replica takes as many samples as the others: with 5 nodes one of them is
    a spare."""
    return {
        nodes: plan for nodes, plan in sizes().items() if not plan.parallel.replica_micro_batches
    }


NAMES = [f"node-{index}" for index in range(8)]
SPARES = ["spare-0", "spare-1"]
pools = st.sets(st.sampled_from(NAMES + SPARES), max_size=10)


def test_the_sizes_of_this_file():
    assert sorted(sizes()) == list(range(1, 9)) and sorted(even()) == [1, 2, 3, 4, 6, 8]
    assert {nodes: plan.parallel.pp for nodes, plan in sizes("tp8_pp2").items()} == {
        1: 1,
        2: 2,
        4: 2,
        6: 2,
        8: 2,
    }


@given(st.lists(pools, min_size=1, max_size=5))
def test_any_walk_over_nodes_keeps_the_batch_and_seats_every_rank_once(walk):
    check_walk(sizes(), walk)


def test_a_walk_through_pipeline_depths():
    check_walk(sizes("tp8_pp2"), [NAMES[1:], NAMES[:2] + SPARES, NAMES[5:6], SPARES[:1], NAMES])


def check_walk(plans, walk):
    plan = plans[8]
    for healthy in walk:
        held = used_nodes(plan)
        new = next_plan(plan, plans, healthy)
        if not healthy:
            assert new is None
            continue
        assert new == next_plan(plan, plans, sorted(healthy)), (
            "the order in which nodes are heard of means nothing"
        )
        assert new.hash == plan_hash(new) and check_cluster(new.cluster) is None
        assert set(used_nodes(new)) <= set(healthy) and len(used_nodes(new)) == legal_size(
            plans, len(healthy)
        )
        par = new.parallel
        assert par.micro_batch_size * sum(taken(par)) == 48 == par.global_batch_samples
        assert (
            len({(rank.node, rank.gpu) for rank in new.ranks})
            == par.world_size
            == 8 * len(used_nodes(new))
        )
        assert all(len({new.ranks[rank].node for rank in group}) == 1 for group in new.groups["tp"])
        if len(used_nodes(new)) == len(held):  # spares took over: nobody else moved
            pairs = zip(plan.ranks, new.ranks, strict=True)
            assert all(a == b for a, b in pairs if a.node in healthy)
            assert new.groups == plan.groups
        elif len(used_nodes(new)) < len(held):
            assert set(used_nodes(new)) <= set(held) or len(set(held) & set(healthy)) < len(
                used_nodes(new)
            )
        plan = new


def test_the_nearest_spare_takes_over():
    four = next_plan(even()[8], even(), [*NAMES[:3], "node-4"])  # leaves: 0-3 and 4-7
    assert set(used_nodes(four)) == {"node-0", "node-1", "node-2", "node-4"}
    lost = next_plan(four, even(), ["node-0", "node-2", "node-4", "node-3", "node-7"])
    assert used_nodes(lost)[used_nodes(four).index("node-1")] == "node-3"


def test_shrinking_parks_the_node_that_stands_apart():
    plan = next_plan(even()[6], even(), [*NAMES[:4], "node-4"])
    assert set(used_nodes(plan)) == set(NAMES[:4])


def test_nothing_changes_when_nothing_has():
    plan = even()[8]
    assert next_plan(plan, even(), NAMES) is plan
    assert next_plan(plan, even(), NAMES + SPARES) is plan
    assert larger_plan(plan, even(), 10) is None


def test_growing_pays_when_it_saves_more_than_it_costs_and_not_at_once():
    small = next_plan(even()[8], even(), NAMES[:4])
    large = larger_plan(small, even(), 9)
    assert len(used_nodes(large)) == 8 and larger_plan(small, even(), 5) is None
    assert large.time.step_s < small.time.step_s
    share = 1 - large.time.step_s / small.time.step_s
    times = {"stable_s": 100, "dwell_s": 60, "cost_s": 30, "horizon_s": 31 / share}
    assert pays(small, large, **times)
    assert not pays(small, large, **(times | {"stable_s": 59}))
    assert not pays(small, large, **(times | {"horizon_s": 29 / share}))
    assert not pays(large, small, **(times | {"horizon_s": 1e9}))


def test_a_stormy_past_is_forgotten_after_a_calm():
    """74 faults in nine minutes once kept a run small for good: no fault was expected to be far
    enough away."""
    assert horizon_s(3600, 540, 0, 5) == 3600
    assert horizon_s(3600, 540, 74, 2) == 540 / 74
    assert horizon_s(3600, 640, 74, 100) == 100
    assert horizon_s(60, 640, 74, 100) == 60


@pytest.mark.parametrize("nodes", [NAMES[2:5], ["spare-0", *NAMES[:2]], SPARES])
def test_a_part_of_a_cluster_is_a_cluster(nodes):
    subcluster = restrict(sizes()[8].cluster, nodes)
    assert subcluster.node_names == list(nodes) and check_cluster(subcluster) is None
