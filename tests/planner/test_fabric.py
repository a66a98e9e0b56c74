"""Cost of a pattern on the fabric: against a naive twin, and against what networks are known to
do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.cost.parameters import PRIOR_VALUES
from orchestrator.cost.path_cache import communicating, group_members
from orchestrator.cost.time import collective
from orchestrator.cost.time.fabric import NO_PATH, Fabric
from orchestrator.plan.ranks import AXES
from tests.reference import fabric_twin as twin

from . import configs

SHARE = PRIOR_VALUES


@st.composite
def ragged_clusters(draw):
    """Up to 8 nodes of up to 4 GPUs; NVLink domains in leaves in one spine, all ragged."""
    leaves = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    nodes = sum(leaves)
    gpus = draw(st.sampled_from([1, 2, 4]))
    spec = configs.cluster(
        nodes, gpus, [("leaf", leaves, draw(st.sampled_from([1.0, 4.0]))), ("spine", nodes, 1.0)]
    )
    cluster = build_cluster(spec)
    if draw(st.booleans()):
        return structs.replace(cluster, nvlink_domains=cluster.levels[0].switches)
    return (
        structs.replace(cluster, direct_nvlink=True)
        if gpus > 1 and draw(st.booleans())
        else cluster
    )


PATTERNS = st.sampled_from(["ring", "chain", "exchange"])


@given(ragged_clusters(), st.permutations(AXES), PATTERNS, st.booleans(), st.data())
@settings(max_examples=120, deadline=None)
def test_equals_the_naive_twin(cluster, order, pattern, wrap, data):
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    inner = data.draw(st.sampled_from([n for n in range(1, gpus + 1) if gpus % n == 0]))
    rest = gpus // inner
    degrees = {"tp": inner, "cp": 1, "ep": 1, "pp": rest, "dp": 1}
    wrap = wrap or pattern != "chain"
    fabric = Fabric(cluster)
    for axis in ("tp", "pp"):
        members = group_members(order, degrees, (axis,))
        path = fabric.path(members, pattern, wrap)
        if members.shape[1] == 1:
            assert path == NO_PATH
            continue
        nvlink, fabric_s, worst = twin.seconds_per_byte(cluster, members.tolist(), pattern, wrap)
        assert (path.nvlink_s, path.fabric_s) == (
            pytest.approx(nvlink, rel=1e-9),
            pytest.approx(fabric_s, rel=1e-9),
        )
        assert path.worst_level == fabric.names[worst]
        assert sum(path.share.values()) == pytest.approx(1.0)


@st.composite
def clusters_in_blocks(draw):
    """Up to 32 nodes: NVLink domains in leaves in pods, all alike, but where the last pod is
    cut."""
    domain, leaf, pods, gpus = (
        draw(st.sampled_from(choices)) for choices in ((1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    )
    nodes = domain * leaf * pods - (draw(st.booleans()) and pods > 1)
    levels = [
        ("leaf", _blocks(nodes, domain * leaf), draw(st.sampled_from([1.0, 4.0]))),
        ("spine", nodes, 1.0),
    ]
    cluster = build_cluster(configs.cluster(nodes, gpus, levels))
    return structs.replace(
        cluster,
        nvlink_domains=[[*range(at, min(at + domain, nodes))] for at in range(0, nodes, domain)],
    )


def _blocks(nodes, size):
    return [min(size, nodes - at) for at in range(0, nodes, size)]


@given(clusters_in_blocks(), st.permutations(AXES), PATTERNS, st.data())
@settings(max_examples=150, deadline=None)
def test_the_groups_of_one_block_stand_for_all(cluster, order, pattern, data):
    """Bit for bit: plans do not change by it. Jobs on a part of the cluster, too."""
    rest = len(cluster.node_names) * cluster.gpus_per_node
    degrees = {}
    for axis in AXES:
        degrees[axis] = data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        rest //= degrees[axis]
    fabric = Fabric(cluster)
    for key in (("tp",), ("pp",), ("cp", "ep", "dp"), ("pp", "dp")):
        mirrored = "pp" in key and len(key) > 1
        if all(degrees[axis] == 1 for axis in key) or (mirrored and degrees["pp"] % 2):
            continue
        members = communicating(order, degrees, (key, pattern))[0]
        at = {
            axis: math.prod(degrees[inner] for inner in order[: order.index(axis)]) for axis in key
        }
        few = fabric.standing_for_all(members, max(at[axis] * degrees[axis] for axis in key))
        assert fabric.path(few, pattern) == fabric.path(members, pattern)


def test_inner_groups_of_a_large_cluster_are_few():
    fabric = Fabric(
        build_cluster(configs.cluster(64, 8, [("leaf", [8] * 8, 1.0), ("spine", 64, 1.0)]))
    )
    members = group_members(AXES, {"tp": 8, "cp": 4, "ep": 1, "pp": 4, "dp": 4}, ("tp",))
    assert len(fabric.standing_for_all(members, 8)) == 1 and len(members) == 64
    members = group_members(AXES, {"tp": 8, "cp": 4, "ep": 1, "pp": 4, "dp": 4}, ("cp",))
    assert len(fabric.standing_for_all(members, 32)) == 16


@given(ragged_clusters(), PATTERNS, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_renaming_nodes_changes_nothing(cluster, pattern, random):
    """The same groups on the same switches cost the same whatever the nodes are called."""
    nodes = len(cluster.node_names)
    gpus = cluster.gpus_per_node
    new = list(range(nodes))
    random.shuffle(new)
    renamed = structs.replace(
        cluster,
        nvlink_domains=[[new[n] for n in block] for block in cluster.nvlink_domains],
        levels=[
            structs.replace(lv, switches=[[new[n] for n in b] for b in lv.switches])
            for lv in cluster.levels
        ],
    )
    members = np.arange(nodes * gpus).reshape(1, -1)
    moved = np.array([[new[r // gpus] * gpus + r % gpus for r in members[0]]])
    a = Fabric(cluster).path(members, pattern)
    b = Fabric(renamed).path(moved, pattern)
    assert (a.nvlink_s, a.fabric_s) == (pytest.approx(b.nvlink_s), pytest.approx(b.fabric_s))
    assert (a.worst_level, a.ring_latency_s) == (b.worst_level, pytest.approx(b.ring_latency_s))


def bus_bandwidth(cluster, members) -> float:
    """GB/s of an endless all-reduce as nccl-tests counts it, with links at their own rates."""
    return 1 / seconds_per_byte(Fabric(cluster).path(np.array(members), "ring")) / 1e9


def seconds_per_byte(path) -> float:
    return max(path.nvlink_s, path.fabric_s)


def test_a_group_with_one_rank_a_node_gets_one_nic():
    """nccl_tuning (8 nodes, 1 rank a node) against (8, 8): 55 and 390 GB/s; what DP looks like when
    TP fills a node."""
    cluster = build_cluster(configs.cluster(8, levels=[("leaf", 8, 1.0)]))
    all_ranks = bus_bandwidth(cluster, [list(range(64))])
    single = bus_bandwidth(cluster, [[8 * node + gpu for node in range(8)] for gpu in range(8)])
    assert single == pytest.approx(50) and all_ranks / single == pytest.approx(8)


@pytest.mark.parametrize(
    ("rows", "members", "measured", "share"),
    [
        ("comm-0364: all-reduce, ring, one DGX H100, 8 GiB", [list(range(8))], 370, "nvlink"),
        (
            "comm-0236: all-reduce, 8 nodes of 8 H100, 8x400 Gb/s, 4 GiB",
            [list(range(64))],
            373,
            "nic",
        ),
    ],
)
def test_large_messages_reach_the_measured_bus_bandwidth(rows, members, measured, share):
    """Alone, a collective reaches most of its links' own rate; in a step, at once with others,
    less."""
    cluster = build_cluster(configs.cluster(8, levels=[("leaf", 8, 1.0)]))
    alone = measured / bus_bandwidth(cluster, members)
    assert 0.8 < alone < 0.95 and 0.65 < SHARE[share] / alone < 0.9


def test_oversubscription_slows_groups_that_cross_together():
    """Eight groups of two across thin uplinks share them; one group alone does not notice."""

    def cost(over: float, groups: int) -> float:
        cluster = build_cluster(configs.cluster(8, levels=[("leaf", 4, over), ("spine", 8, 1.0)]))
        members = np.array([[rank, rank + 32] for rank in range(groups)])
        return seconds_per_byte(Fabric(cluster).path(members, "ring"))

    assert cost(7, 32) == pytest.approx(7 * cost(1, 32))
    assert cost(7, 1) == pytest.approx(cost(1, 1))


def test_all_to_all_falls_off_the_nvlink_cliff():
    """planning.md B: 32 GPUs, 24 to 48 GB/s over the network, 640 inside one NVL72 domain."""
    far = build_cluster(configs.cluster(8, 4, [("leaf", 8, 1.0)]))
    near = structs.replace(far, nvlink_domains=[list(range(8))])
    members = np.arange(32).reshape(1, 32)
    cliff = [seconds_per_byte(Fabric(c).path(members, "exchange")) for c in (far, near)]
    assert cliff[0] > 5 * cliff[1]


@pytest.mark.parametrize(("gpus", "pair"), [(3, 1 / 2), (4, 1 / 3), (8, 1 / 7)])
def test_a_pair_of_gpus_without_a_switch_has_its_own_links_alone(gpus, pair):
    """Quad GH200 (arXiv 2408.11556): 150 of 450 GB/s between two GPUs; all four together reach all
    of it."""
    cluster = structs.replace(build_cluster(configs.cluster(2, gpus)), direct_nvlink=True)
    fabric = Fabric(cluster)
    rate = cluster.nvlink.bytes_per_s

    def reached(members: list[int], pattern: str) -> float:
        return 1 / (fabric.path(np.array([members]), pattern).nvlink_s * rate)

    assert reached([0, 1], "ring") == pytest.approx(pair) == pytest.approx(reached([1, 2], "chain"))
    assert reached([0, 1], "exchange") == pytest.approx(pair)
    everyone = list(range(gpus))
    assert (
        reached(everyone, "ring")
        == pytest.approx(1)
        == pytest.approx(reached(everyone, "exchange"))
    )
    assert reached([0, 1, 2], "ring") == pytest.approx(2 * pair)
    assert reached([0, 1, gpus, gpus + 1], "ring") == pytest.approx(pair)


def test_collective_sizes():
    size = 1e9
    n = 8
    assert collective.sent_bytes("all_reduce", size, n) == 2 * size * 7 / 8
    assert [collective.sent_bytes(name, size, n) for name in ("reduce_scatter", "all_gather")] == [
        size * 7 / 8
    ] * 2
    assert collective.sent_bytes("all_reduce", size, 1) == 0
    path = Fabric(build_cluster(configs.cluster())).path(np.arange(64).reshape(1, 64), "ring")
    both = collective.seconds("reduce_scatter", size, 64, path) + collective.seconds(
        "all_gather", size, 64, path
    )
    assert collective.seconds("all_reduce", size, 64, path) == pytest.approx(both)
    small, large = (collective.seconds("all_reduce", s, 64, path) for s in (1, 1e10))
    assert small > 1e-5 and large > 100 * small  # latency, then bandwidth
