"""Experts are placed by bytes: as few of their tokens as can be leave the NVLink domain, the leaf,
the pod. Folded meshes, too. Held against a twin that counts pairs of ranks, over every nesting
order and every choice of nodes."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from orchestrator.cluster.build import build_cluster
from orchestrator.cost.nesting import axis_placement, candidates, orders
from orchestrator.plan import hierarchy
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.ranks import degrees
from orchestrator.planner.placement.best_order import choose
from orchestrator.planner.placement.node_placement import place_nodes
from tests.reference.expert_placement import groups_of_experts, peers_by_level
from tests.reference.node_placement_twin import best_step

from . import configs, shapes
from .test_node_placement import ragged, shuffled


@st.composite
def meshes(draw, world: int, alone: bool = False):
    """Degrees of `world` ranks, experts folded in any way. `alone`: nothing but replicas beside the
    experts' ranks."""
    tp = (
        1
        if alone
        else draw(st.sampled_from([degree for degree in (1, 2, 4) if world % degree == 0]))
    )
    cp = draw(st.sampled_from([degree for degree in (1, 2) if world % (tp * degree) == 0]))
    ep = draw(
        st.sampled_from([degree for degree in (1, 2, 4, 8) if world % (tp * cp * degree) == 0])
    )
    etp = draw(st.sampled_from([degree for degree in (1, 2, 4) if tp % degree == 0]))
    fold_cp = cp > 1
    fold_cp = fold_cp and (alone or draw(st.booleans()))
    pp = (
        1
        if alone
        else draw(
            st.sampled_from([degree for degree in (1, 2) if world % (tp * cp * ep * degree) == 0])
        )
    )
    dp = world // (tp * cp * ep * pp)
    assume(8 % (tp // etp * ep * (cp if fold_cp else 1)) == 0)
    names = {"etp": etp if etp < tp else UNSET, "fold_cp": True if fold_cp else UNSET}
    return {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": dp}, names


@st.composite
def cases(draw, max_nodes: int = 5, alone: bool = False):
    """(cluster, costs of a job on it) with ragged switches and, sometimes, domains of two nodes."""
    domain = draw(st.sampled_from([1, 1, 2]))
    sizes = st.integers(1, 3).map(lambda count: count * domain)
    leaves = draw(
        st.lists(sizes, min_size=1, max_size=3).filter(
            lambda leaf_sizes: 2 <= sum(leaf_sizes) <= max_nodes
        )
    )
    split = draw(st.integers(1, len(leaves)))
    pods = [split, len(leaves) - split] if split < len(leaves) else [split]
    over = draw(st.sampled_from([(1.0, 1.0), (4.0, 1.0)]))
    cluster = shuffled(ragged(leaves, pods, over=over, domain=domain), draw(st.integers(0, 99)))
    slots = draw(st.sampled_from([count for count in (2, 4) if count <= sum(leaves)]))
    sizes_of, folded = draw(meshes(slots * 4, alone))
    spec = configs.cluster(slots, 4, [("fabric", 64, 1.0)])
    values = {**sizes_of, "zero": 1, "allow_tp_across_nvlink": True}
    batch = (512 if alone else 2) * sizes_of["dp"] * sizes_of["ep"]
    plan = configs.planned(
        shapes.mixtral_8x7b(), values, spec, global_batch_samples=batch, seq_len=2048
    )
    parallel = structs.replace(plan.parallel, **folded)
    assume(parallel.sp or parallel.tp == 1)
    assume(expert_mesh(parallel).ep > 1)
    plan = structs.replace(plan, parallel=parallel)
    return cluster, configs.costing(plan, cluster)


@given(cases(max_nodes=6), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_bytes_by_level_are_those_of_every_pair_of_ranks(case, seed):
    cluster, (path_cache, parallel, traffic, work) = case
    nodes = list(range(len(cluster.node_names)))
    random.Random(seed).shuffle(nodes)
    nodes = nodes[: -(-parallel.world_size // cluster.gpus_per_node)]
    order = random.Random(seed).choice(list(orders(degrees(parallel))))
    candidate = candidates(path_cache.reordered(nodes), parallel, traffic, work, order)[0]
    placed = axis_placement(candidate, traffic)["ep"]
    sent = sum(item.sent_bytes for item in max(traffic, key=len) if item.axis == "ep")
    ranks = peers_by_level(cluster, parallel, order, nodes)
    peer_count = expert_mesh(parallel).ep - 1
    names = ["nvlink", *(level.name for level in cluster.levels)]
    worst = max((level for rank in ranks for level in rank), key=names.index)
    busiest = max(rank[worst] for rank in ranks)
    assert placed.worst_level == worst
    assert placed.bytes_per_step_by_level[worst] == pytest.approx(sent * busiest / peer_count)
    assert sum(placed.bytes_per_step_by_level.values()) == pytest.approx(sent)
    assert any(
        placed.bytes_per_step_by_level
        == pytest.approx(
            {level: sent * count / peer_count for level, count in rank.items() if count}
        )
        for rank in ranks
    )


@given(cases())
@settings(max_examples=25, deadline=None)
def test_the_best_of_every_placement(case):
    """Experts inside a domain where any placement can have them so, then the least step."""
    _, args = case
    placement = place_nodes(*args)
    want = best_step(*args, len(placement.nodes))
    assert (placement.score.tp_outside, placement.score.ep_outside) == want[:2]
    assert (
        placement.score.step_s == pytest.approx(want[2], rel=1e-8)
        and placement.bound_s <= placement.score.step_s
    )
    heuristic = place_nodes(*args, exact=False)
    assert heuristic.score >= placement.score and heuristic.bound_s <= placement.score.step_s + 1e-9


@given(cases(alone=True))
@settings(max_examples=25, deadline=None)
def test_no_placement_sends_fewer_bytes_of_experts_over_the_top(case):
    """The exchange is what costs most here: no choice of nodes and nesting order has fewer of its
    bytes on the highest level that it must cross."""
    cluster, (path_cache, parallel, traffic, work) = case
    slots = -(-parallel.world_size // cluster.gpus_per_node)
    names = [level.name for level in cluster.levels]

    def over(order, nodes) -> tuple[int, ...]:
        """Peers of the rank that has most of them there, from the top of the network downwards."""
        ranks = peers_by_level(cluster, parallel, order, nodes)
        return tuple(
            max(sum(rank[name] for name in names[at:]) for rank in ranks)
            for at in reversed(range(len(names)))
        )

    placement = place_nodes(path_cache, parallel, traffic, work)
    least = min(
        over(order, nodes)
        for nodes in permutations(range(len(cluster.node_names)), slots)
        for order in orders(degrees(parallel))
    )
    assert over(placement.candidate.order, placement.nodes) == least


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_go_by_domain_in_the_orders_in_which_they_can(data):
    """A plan that asks for the exchange by domain gets a nesting order in which it is legal, if
    there is one; and what the placement says is what the plan's ranks say."""
    spec = configs.cluster(
        data.draw(st.sampled_from([2, 4])), 4, domain_nodes=data.draw(st.sampled_from([1, 2]))
    )
    sizes, folded = data.draw(meshes(spec.nodes * 4))
    parallel = {key: value for key, value in (sizes | folded).items() if value is not UNSET}
    parallel |= {"allow_tp_across_nvlink": True, "order": ["tp", "cp", "ep", "pp", "dp"]}
    batch = 2 * sizes["dp"] * sizes["ep"]
    plan = configs.planned(
        shapes.mixtral_8x7b(), parallel, spec, global_batch_samples=batch, seq_len=2048
    )
    assume(expert_mesh(plan.parallel).ep > 1)
    cluster = build_cluster(spec)
    hierarchical_plan = structs.replace(
        plan, parallel=structs.replace(plan.parallel, expert_all_to_all="hierarchical")
    )
    args = configs.costing(hierarchical_plan, cluster)
    every = candidates(*args)
    for candidate in every:
        order = list(candidate.order)
        own_plan = configs.planned(
            shapes.mixtral_8x7b(),
            parallel | {"order": order},
            spec,
            global_batch_samples=batch,
            seq_len=2048,
        )
        own_plan = structs.replace(
            own_plan, parallel=structs.replace(own_plan.parallel, expert_all_to_all="hierarchical")
        )
        assert candidate.legal == (hierarchy.problem(own_plan) is None), order
        assert sorted(map(sorted, hierarchy.expert_groups(own_plan))) == sorted(
            groups_of_experts(own_plan.parallel, order)
        )
    assert choose(every, args[0].fabric.names[1:]).legal == any(
        candidate.legal for candidate in every
    )
