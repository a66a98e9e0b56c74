"""Descriptions unfold to what they say, and broken ones are refused with the place."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.cluster import check_cluster
from tests.planner import configs


def test_regular_ragged_and_short_switches():
    cluster = build_cluster(configs.cluster())
    assert cluster.node_names[0] == "node-0" and len(cluster.node_names) == 8
    assert cluster.levels[0].switches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cluster.levels[0].bytes_per_s == 50e9  # 400 Gb/s, one NIC a GPU
    assert len(cluster.nvlink_domains) == 8
    assert build_cluster(configs.cluster(7)).levels[0].switches == [[0, 1, 2, 3], [4, 5, 6]]
    cluster = build_cluster(
        configs.cluster(7, levels=[("leaf", [3, 1, 3], 1.0), ("spine", 7, 1.0)])
    )
    assert cluster.levels[0].switches == [[0, 1, 2], [3], [4, 5, 6]]


def test_nvlink_domain_over_several_nodes():
    cluster = build_cluster(
        configs.cluster(36, 4, [("leaf", 18, 1.0), ("spine", 36, 1.0)], domain_nodes=18)
    )
    assert cluster.nvlink_domains == cluster.levels[0].switches == [[*range(18)], [*range(18, 36)]]


def test_a_path_is_no_faster_than_its_nic():
    spec = configs.cluster()
    slow = structs.replace(spec, nic=structs.replace(spec.nic, gbit_per_s=100, per_node=4))
    assert build_cluster(slow).levels[1].bytes_per_s == 100e9 / 8 * 4 / 8


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (
            configs.cluster(levels=[("leaf", [4, 3], 1.0), ("spine", 8, 1.0)]),
            r"leaf.* sums to 7, the cluster has 8",
        ),
        (configs.cluster(levels=[("leaf", 4, 1.0)]), r"meet nowhere: the last level, leaf, has 2"),
        (configs.cluster(levels=[]), r"meet nowhere: the last level, nvlink, has 8"),
        (
            configs.cluster(levels=[("leaf", 4, 1.0), ("pod", 6, 1.0), ("top", 8, 1.0)]),
            r"leaf block 1 is split .* pod",
        ),
        (
            configs.cluster(levels=[("leaf", 4, 1.0), ("leaf", 8, 1.0)]),
            r"level name 'leaf' is taken",
        ),
        (configs.cluster(levels=[("nvlink", 8, 1.0)]), r"level name 'nvlink' is taken"),
        (
            configs.cluster(domain_nodes=3, levels=[("leaf", 4, 1.0), ("s", 8, 1.0)]),
            r"nvlink block 1 is split .* leaf",
        ),
    ],
)
def test_broken_descriptions_name_the_place(spec, line):
    with pytest.raises(OrchError, match=line) as caught:
        build_cluster(spec)
    assert caught.value.exit == Exit.CONFIG and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("switches", "line"),
    [
        ([[0, 1, 2, 3], [3, 4, 5, 6, 7]], "node 3 is in leaf blocks 0 and 1"),
        ([[0, 1, 2, 3], [4, 5, 6]], "node 7 is in no leaf block"),
        ([[0, 1, 2, 3], [4, 5, 6, 7, 8]], "lists node 8, the nodes are 0..7"),
    ],
)
def test_explicit_switch_lists_are_checked(switches, line):
    cluster = build_cluster(configs.cluster())
    leaf = structs.replace(cluster.levels[0], switches=switches)
    assert line in (check_cluster(structs.replace(cluster, levels=[leaf, cluster.levels[1]])) or "")
    assert "named twice" in (check_cluster(structs.replace(cluster, node_names=["a"] * 8)) or "")
