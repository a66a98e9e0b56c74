"""Ranks, groups and stages: exact algebra against naive twins."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cluster.build import build_cluster
from orchestrator.cost.model.layers import head_flops, layer_flops
from orchestrator.cost.model.stages import balance_stages
from orchestrator.cost.nesting import orders
from orchestrator.cost.path_cache import group_members
from orchestrator.plan.ranks import AXES, COMPOSITE, all_groups, coords, groups, nested_groups
from orchestrator.planner.placement.rank_assignment import assign_ranks
from tests.reference.fabric_twin import groups_by_pairs

from . import configs, shapes

small = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})


@given(small, st.permutations(AXES), st.sampled_from([*((a,) for a in AXES), *COMPOSITE.values()]))
@settings(max_examples=60, deadline=None)
def test_groups_agree_with_the_rank_algebra_and_with_all_pairs(degrees, order, varying):
    coordinates = coords(order, degrees)
    members = group_members(order, degrees, varying).tolist()
    assert sorted(members) == sorted(
        groups(coordinates, varying)
    )  # members in the same order, groups in any
    assert {frozenset(group) for group in members} == groups_by_pairs(coordinates, varying)
    world = math.prod(degrees.values())
    assert sorted(itertools.chain(*members)) == list(range(world))  # a partition


@given(small, st.permutations(AXES))
@settings(max_examples=60, deadline=None)
def test_groups_from_strides_are_those_read_off_the_coordinates(degrees, order):
    assert nested_groups(order, degrees) == all_groups(coords(order, degrees), degrees["pp"])


@given(small)
@settings(max_examples=30, deadline=None)
def test_every_order_gives_every_coordinate_once(degrees):
    axis_orders = list(orders(degrees))
    assert axis_orders[0] == AXES
    assert (
        len(axis_orders)
        == len(set(axis_orders))
        == math.factorial(sum(degree > 1 for degree in degrees.values()))
    )
    for order in axis_orders:
        assert sorted(order) == sorted(AXES)
        assert len(
            {tuple(coordinate.values()) for coordinate in coords(order, degrees)}
        ) == math.prod(degrees.values())


def test_seats_fill_node_by_node_with_the_nearest_nic():
    spec = configs.cluster(2, 8, [("leaf", 2, 1.0)])
    cluster = build_cluster(spec)
    coordinates = coords(AXES, {"tp": 8, "cp": 1, "ep": 1, "pp": 2, "dp": 1})
    ranks = assign_ranks(cluster, coordinates)
    expected_seats = [("node-0", 6, 6), ("node-0", 7, 7), ("node-1", 0, 0), ("node-1", 1, 1)]
    assert [(r.node, r.gpu, r.nic) for r in ranks[6:10]] == expected_seats


def test_stages_are_even_where_that_is_nearly_as_fast_and_else_the_published_ones():
    """arXiv 2407.21783, section 3.3.2: one layer fewer on the first and on the last stage."""
    assert balance_stages(shapes.llama3_405b(), 16, 8192) == [7, *[8] * 14, 7]
    assert balance_stages(shapes.llama3_70b(), 4, 8192) == [20, 20, 20, 20]
    assert balance_stages(shapes.llama3_405b(), 128, 8192) == [
        0,
        *[1] * 126,
        0,
    ]  # embedding and head alone


def slowest(model, counts, seq_len):
    layer = layer_flops(model, 0, seq_len).total
    return max([*(count * layer for count in counts[:-1]), counts[-1] * layer + head_flops(model)])


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([64, 512, 4096, 20000]))
@settings(max_examples=60, deadline=None)
def test_balance_is_the_best_of_all_splits(layers, stages, vocab):
    if stages > layers:
        return
    model = shapes.model("m", layers, 256, 4, 4, 512, vocab)
    counts = balance_stages(model, stages, 512, tolerance=0.0)
    assert len(counts) == stages and sum(counts) == layers and min(counts) >= 1
    splits = [c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers]
    assert slowest(model, counts, 512) == pytest.approx(min(slowest(model, c, 512) for c in splits))
