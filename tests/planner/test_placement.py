"""The order chosen is the best of all orders, keeps TP inside NVLink, and prefers the default on
ties."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cost.nesting import candidates
from orchestrator.plan.ranks import AXES, all_groups, as_dict
from orchestrator.planner.placement.best_order import TIE

from . import configs, shapes
from .configs import build_plan, largest, main_line, planned


def every_order(plan):
    """All candidates for a plan's degrees."""
    return candidates(*configs.costing(plan, plan.cluster))


@st.composite
def plans(draw):
    nodes = draw(st.sampled_from([2, 4, 8]))
    leaf = draw(st.sampled_from([1, 2, nodes]))
    over = draw(st.sampled_from([1.0, 4.0]))
    spec = configs.cluster(nodes, 4, [("leaf", leaf, over), ("spine", nodes, 1.0)])
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([d for d in (1, 2, 4) if (nodes * 4) % (tp * d) == 0]))
    cp = draw(st.sampled_from([d for d in (1, 2) if (nodes * 4) % (tp * pp * d) == 0]))
    parallel = {"tp": tp, "pp": pp, "cp": cp, "zero": draw(st.sampled_from([0, 1]))}
    return planned(shapes.llama3_8b(), parallel, spec, global_batch_samples=64)


@given(plans())
@settings(max_examples=40, deadline=None)
def test_no_order_is_better_and_tp_stays_inside(plan):
    costed_orders = every_order(plan)
    inside = [c for c in costed_orders if not c.outside_nvlink("tp")]
    assert plan.placement["tp"].worst_level in ("self", "nvlink")
    assert plan.time.step_s <= min(c.step_s for c in inside) * (1 + TIE)


@given(plans())
@settings(max_examples=25, deadline=None)
def test_every_rank_once_and_groups_partition(plan):
    assert len({(rank.node, rank.gpu) for rank in plan.ranks}) == plan.parallel.world_size
    assert plan.groups == all_groups([as_dict(rank) for rank in plan.ranks], plan.parallel.pp)
    for axis in (*AXES, "grad", "model"):
        assert sorted(r for group in plan.groups[axis] for r in group) == list(
            range(plan.parallel.world_size)
        )


def test_ties_go_to_the_default_nesting():
    """One full-bisection switch: every order of pp and dp costs the same to within the tie."""
    spec = configs.cluster(8, 8, [("fabric", 8, 1.0)])
    plan = planned(shapes.llama3_70b(), {"tp": 8, "pp": 2, "zero": 1}, spec)
    assert plan.parallel.order == list(AXES)


def test_heavy_gradients_go_under_the_leaf_when_uplinks_are_thin():
    """planning.md E2: DP before PP wins when pods are small and gradients dominate (few
    micro-batches)."""
    spec = configs.cluster(8, 8, [("leaf", 2, 16.0), ("spine", 8, 1.0)])
    degrees = {"tp": 8, "pp": 4, "zero": 1}
    config = configs.config(
        spec, shapes.llama3_70b(), degrees, global_batch_samples=8, seq_len=1024
    )
    plan = build_plan(config)
    assert plan.parallel.order.index("dp") < plan.parallel.order.index("pp")
    assert plan.placement["dp"].worst_level == "leaf"
    default = build_plan(
        structs.replace(config, parallel=structs.replace(config.parallel, order=list(AXES)))
    )
    assert plan.time.step_s < default.time.step_s


def test_experts_stay_inside_nvlink_where_they_can():
    plan = planned(shapes.mixtral_8x7b(), {"ep": 8, "pp": 4, "zero": 1})
    assert plan.placement["ep"].worst_level == "nvlink"


def test_bytes_by_level_are_the_bytes_sent():
    plan = main_line()
    ranks = configs.costing(plan, plan.cluster)[2]
    for axis in AXES:
        sent = max(
            sum(item.sent_bytes for item in traffic if item.axis == axis) for traffic in ranks
        )
        assert math.isclose(sum(plan.placement[axis].bytes_per_step_by_level.values()), sent)


def test_on_the_largest_cluster_pipelines_stay_inside_pods_and_tp_inside_nodes():
    assert len(largest().ranks) == 16384
    assert [largest().placement[axis].worst_level for axis in ("tp", "pp")] == ["nvlink", "pod"]
