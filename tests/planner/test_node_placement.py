"""NodePlacement: equal to brute force on small networks, never worse than the scheduler's order,
certified."""

from __future__ import annotations

import math
import random
from itertools import accumulate, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cluster.build import build_cluster
from orchestrator.cost.path_cache import PathCache
from orchestrator.plan.cluster import check_cluster
from orchestrator.plan.document import Cluster
from orchestrator.planner.placement.group_packing import distinct_node_orders
from orchestrator.planner.placement.node_placement import place_nodes, reorder
from tests.reference.node_placement_twin import best_step

from . import configs, shapes
from .configs import planned


def ragged(
    leaves: list[int],
    pods: list[int],
    gpus: int = 4,
    over: tuple[float, float] = (1.0, 1.0),
    domain: int = 1,
):
    """leaves: nodes of each; pods: leaves of each."""
    nodes = sum(leaves)
    ends = list(accumulate(pods))
    counts = [sum(leaves[end - pod : end]) for pod, end in zip(pods, ends, strict=True)]
    levels = [("leaf", leaves, over[0]), ("pod", counts, over[1]), ("core", nodes, 1.0)]
    return build_cluster(configs.cluster(nodes, gpus, levels, domain_nodes=domain))


def shuffled(cluster: Cluster, seed: int) -> Cluster:
    order = list(range(len(cluster.node_names)))
    random.Random(seed).shuffle(order)
    return reorder(cluster, order)


def job(
    cluster: Cluster,
    tp: int,
    pp: int,
    dp: int,
    cp: int = 1,
    ep: int = 1,
    batch: int = 64,
    zero: int = 1,
):
    """(path_cache, parallel, traffic, work) of a job that may use fewer nodes than the cluster
    has."""
    gpus = cluster.gpus_per_node
    spec = configs.cluster(tp * pp * dp * cp * ep // gpus, gpus, [("fabric", 64, 1.0)])
    model = shapes.mixtral_8x7b() if ep > 1 else shapes.llama3_8b()
    values = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero}
    plan = planned(model, values, spec, global_batch_samples=batch, seq_len=2048)
    return configs.costing(plan, cluster)


@st.composite
def cases(draw, max_nodes: int = 6):
    leaves = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=4).filter(
            lambda sizes: 2 <= sum(sizes) <= max_nodes
        )
    )
    split = draw(st.integers(1, len(leaves)))
    pods = [split, len(leaves) - split] if split < len(leaves) else [split]
    over = draw(st.sampled_from([(1.0, 1.0), (4.0, 1.0), (2.0, 7.0)]))
    cluster = shuffled(ragged(leaves, pods, over=over), draw(st.integers(0, 99)))
    slots = draw(st.sampled_from([n for n in (2, 4, 6, 8) if n <= sum(leaves)]))
    world = slots * 4
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([d for d in (1, 2, 4) if world % (tp * d) == 0]))
    rest = world // (tp * pp)
    cp = draw(st.sampled_from([d for d in (1, 2) if rest % d == 0]))
    return cluster, job(
        cluster, tp, pp, rest // cp, cp, batch=rest // cp * draw(st.sampled_from([1, 4]))
    )


def equals_brute_force(case) -> None:
    _, args = case
    placement = place_nodes(*args)
    want = best_step(*args, len(placement.nodes))
    assert (placement.score.tp_outside, placement.score.ep_outside) == want[:2]
    assert math.isclose(placement.score.step_s, want[2], rel_tol=1e-8)
    assert placement.exact and placement.bound_s <= placement.score.step_s
    heuristic = place_nodes(*args, exact=False)
    assert heuristic.score >= placement.score and heuristic.score <= heuristic.given_score
    assert heuristic.bound_s <= placement.score.step_s + 1e-9, "the bound holds for the best of all"


FULL = pytest.mark.full
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("nodes", "examples"),
    [
        (5, 40),
        pytest.param(6, 800, marks=FULL),
        pytest.param(8, 20, marks=SLOW),
        pytest.param(8, 200, marks=FULL),
    ],
)
def test_equals_brute_force(nodes, examples):
    settings(max_examples=examples, deadline=None)(
        given(cases(max_nodes=nodes))(equals_brute_force)
    )()


@given(cases(), st.integers(1, 99))
@settings(max_examples=20, deadline=None)
def test_names_do_not_matter(case, seed):
    cluster, (path_cache, parallel, traffic, work) = case
    again = PathCache(shuffled(cluster, seed))
    assert (
        place_nodes(path_cache, parallel, traffic, work).score
        == place_nodes(again, parallel, traffic, work).score
    )


@given(cases(max_nodes=8))
@settings(max_examples=30, deadline=None)
def test_symmetric_keeps_one_of_each_class(case):
    """Every ordered choice has exactly one representative: classes found by comparing patterns."""
    fabric = case[1][0].fabric
    slots = min(3, fabric.block.shape[1])
    every = {
        fabric.reordered(nodes).signature()
        for nodes in permutations(range(fabric.block.shape[1]), slots)
    }
    representatives = [
        fabric.reordered(nodes).signature() for nodes in distinct_node_orders(fabric, slots)
    ]
    assert set(representatives) == every


def scattered() -> Cluster:
    """What a busy cluster leaves: 15 leaf groups, as a 64-node H100 cluster really had
    (marin#6950)."""
    return ragged(
        [1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 6, 6, 6, 8, 11], [5, 5, 5], gpus=8, over=(2.0, 4.0)
    )


@pytest.mark.parametrize("shape", [(8, 4, 16), (8, 2, 32), (4, 4, 24), (8, 8, 6)])
def test_fragmented_cluster_beats_the_order_it_came_in(shape):
    cluster = shuffled(scattered(), 7)
    placement = place_nodes(*job(cluster, *shape, batch=shape[2] * 8))
    assert len(set(placement.nodes)) == len(placement.nodes) == math.prod(shape) // 8
    assert placement.score < placement.given_score
    assert placement.score.step_s >= placement.bound_s and 0 <= placement.gap < 1


def test_fewer_nodes_than_free_are_taken_together():
    cluster = shuffled(ragged([2, 3, 8, 4], [2, 2], gpus=8, over=(8.0, 8.0)), 3)
    placement = place_nodes(*job(cluster, 8, 2, 4, batch=8))
    assert (
        sum(not set(leaf).isdisjoint(placement.nodes) for leaf in cluster.levels[0].switches) == 1
    ), "one leaf has eight"
    assert placement.gap < 0.02


@given(cases(), st.randoms())
@settings(max_examples=30, deadline=None)
def test_reorder_moves_names_and_blocks_together(case, rng):
    cluster = case[0]
    chosen = rng.sample(range(len(cluster.node_names)), 2)
    moved = reorder(cluster, chosen)
    assert moved.node_names[:2] == [cluster.node_names[node] for node in chosen]
    assert check_cluster(moved) is None
    for a, b in zip(cluster.levels, moved.levels, strict=True):

        def names(c, level):
            return {frozenset(c.node_names[n] for n in block) for block in level.switches}

        assert names(cluster, a) == names(moved, b)


def test_a_rack_scale_domain_is_used_whole():
    """TP over two nodes of one NVLink domain: legal only where both nodes are in the same rack."""
    cluster = ragged([2, 2], [2], gpus=4, domain=2)
    broken = reorder(cluster, [0, 2, 1, 3])
    spec = configs.cluster(4, 4, [("fabric", 4, 1.0)], domain_nodes=2)
    plan = planned(shapes.llama3_8b(), {"tp": 8, "zero": 1}, spec, global_batch_samples=4)
    placement = place_nodes(*configs.costing(plan, broken))
    assert placement.given_score.tp_outside and not placement.score.tp_outside


def test_a_plan_on_imported_nodes(tmp_path):
    """A site's file becomes ranks: busy leaves, a job smaller than what is free, spares behind,
    certified."""
    file = tmp_path / "topology.conf"
    leaves = ["n[0-2]", "n[3-10]", "n[11-14]"]
    lines = [f"SwitchName=l{i} Nodes={nodes}" for i, nodes in enumerate(leaves)]
    file.write_text("\n".join([*lines, "SwitchName=s Switches=l[0-2]"]))
    spec = configs.cluster(8, 8, [("leaf", 4, 8.0), ("spine", 8, 1.0)], topology_file=str(file))
    values = {"tp": 8, "pp": 2, "dp": 4, "zero": 1}
    plan = planned(shapes.llama3_8b(), values, spec, global_batch_samples=8, seq_len=1024)
    assert {rank.node for rank in plan.ranks} == {f"n{i}" for i in range(3, 11)}
    assert len(plan.cluster.node_names) == 15 and plan.placement["dp"].worst_level == "leaf"
    assert plan.time.step_s < plan.certificate.given_step_s
    assert plan.certificate.bound_s <= plan.time.step_s and plan.certificate.gap < 0.01
    every = planned(shapes.llama3_8b(), {"tp": 8, "zero": 1}, spec, global_batch_samples=15)
    assert every.parallel.dp == 15
