"""Free nodes chosen, the cluster that they make, and a plan moved onto it. Pure."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cluster.importers.slurm import from_addresses, parse_topology
from orchestrator.cluster.importers.slurm_nodes import parse_nodes
from orchestrator.cluster.model import FLAT
from orchestrator.cluster.nodes import choose_nodes, with_nodes
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.plan.ranks import check_ranks
from orchestrator.planner.elastic.replan import difference, replan
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.beds.slurm import large_output as big

TESTBED = from_addresses({f"n{i}": f"spine.leaf{i // 4}.n{i}" for i in range(8)})
PLAN = make_plan(tp=8, pp=4, dp=2, nodes=8)


def test_real_nodes_take_the_places_of_the_planned_ones():
    real = replan(
        PLAN, with_nodes(PLAN.cluster, [f"n{i}" for i in (7, 6, 5, 4, 3, 2, 1, 0)], TESTBED)
    )
    assert check_ranks(real) is None
    assert real.cluster.node_names == [f"n{i}" for i in range(8)]
    assert [level.name for level in real.cluster.levels] == ["leaf", "spine"]
    assert real.cluster.levels[0].switches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    node = {rank.rank: rank.node for rank in real.ranks}
    assert all(len({node[r] for r in group}) == 1 for group in real.groups["tp"]), (
        "tensor-parallel groups are nodes"
    )
    for group in real.groups["pp"]:
        assert len({int(node[r][1]) // 4 for r in group}) == 1, "a pipeline stays under one leaf"
    assert real.hash != PLAN.hash and difference(PLAN, real).moved_ranks == 64


def test_the_same_nodes_give_the_same_plan_again():
    real = replan(PLAN, with_nodes(PLAN.cluster, [f"n{i}" for i in range(8)], TESTBED))
    again = replan(real, with_nodes(real.cluster, [f"n{i}" for i in range(8)], TESTBED))
    assert again == real
    change = difference(real, again)
    assert change.text == "placed as planned" and change.cost == 0


def test_a_scattered_allocation_says_what_it_costs():
    plan = replan(PLAN, with_nodes(PLAN.cluster, [f"n{i}" for i in range(8)], TESTBED))
    addresses = {f"m{i}": f"core.spine{i % 2}.leaf{i}.m{i}" for i in range(8)}
    change = difference(
        plan, replan(plan, with_nodes(plan.cluster, addresses, from_addresses(addresses)))
    )
    assert not change.same_nodes
    assert change.worst_levels["pp"] == ["leaf", "spine"]
    assert (
        change.text.startswith("on m[0-7]: ") and "pp crosses spine instead of leaf" in change.text
    )
    assert change.step_s[0] == plan.time.step_s


def test_too_few_nodes_is_no_capacity():
    with refusal("needs 64 GPUs", Exit.CAPACITY):
        replan(PLAN, with_nodes(PLAN.cluster, ["n0", "n1"], TESTBED))


def test_flat_and_partial_topologies_still_make_a_cluster():
    flat = with_nodes(PLAN.cluster, [f"n{i}" for i in range(4)], FLAT)
    assert [level.name for level in flat.levels] == ["fabric"]
    partial = parse_topology("SwitchName=l0 Nodes=n[0-1]\nSwitchName=l1 Nodes=n[2-3]")
    cluster = with_nodes(PLAN.cluster, ["n0", "n1", "n2", "n3", "x9"], partial)
    assert (
        cluster.levels[0].switches == [[0, 1], [2, 3], [4]] and cluster.levels[-1].name == "fabric"
    )


def test_blocks_become_nvlink_domains_on_rack_scale_systems():
    base = msgspec.structs.replace(
        make_plan(tp=8, dp=8, nodes=8).cluster, nvlink_domains=[[0, 1, 2, 3], [4, 5, 6, 7]]
    )
    blocks = parse_topology("BlockName=b0 Nodes=a[0-3]\nBlockName=b1 Nodes=a[4-7]\nBlockSizes=4")
    assert with_nodes(base, ["a0", "a1", "a4", "a5", "a6", "a7"], blocks).nvlink_domains == [
        [0, 1],
        [2, 3, 4, 5],
    ]


@given(st.sets(st.integers(0, 63), min_size=1), st.data())
def test_chosen_nodes_are_free_distinct_and_together(free, data):
    topology = parse_topology(
        "\n".join(f"SwitchName=l{i} Nodes=n[{8 * i}-{8 * i + 7}]" for i in range(8))
        + "\n" + "\n".join(f"SwitchName=s{i} Switches=l[{4 * i}-{4 * i + 3}]" for i in range(2))
        + "\nSwitchName=core Switches=s[0-1]"
    )  # fmt: skip
    count = data.draw(st.integers(1, len(free)))
    chosen = choose_nodes([f"n{i}" for i in free], topology, count)
    assert len(chosen) == len(set(chosen)) == count and {int(n[1:]) for n in chosen} <= free
    leaf_free = [sum(i // 8 == leaf for i in free) for leaf in range(8)]
    spine_free = [sum(i // 32 == spine for i in free) for spine in range(2)]
    if max(leaf_free) >= count:
        assert len({int(n[1:]) // 8 for n in chosen}) == 1, "one leaf would do"
    elif max(spine_free) >= count:
        assert len({int(n[1:]) // 32 for n in chosen}) == 1, "one spine would do"


def test_choosing_more_than_is_free_is_no_capacity():
    with pytest.raises(OrchError, match="9 nodes are wanted, 8 are free"):
        choose_nodes([f"n{i}" for i in range(8)], TESTBED, 9)


def test_five_thousand_nodes_read_chosen_and_placed():
    """benchmarks/slurm_scale.py has the seconds."""
    node_listing = big.scontrol_nodes(5000)
    network = big.scontrol_topology(5000)
    nodes = parse_nodes(node_listing)
    topology = parse_topology(network)
    assert len(nodes) == 5000 and [len(tier.switches) for tier in topology.tiers] == [157, 20, 1]
    chosen = choose_nodes([n.name for n in nodes if n.free], topology, 8)
    plan = replan(PLAN, with_nodes(PLAN.cluster, chosen, topology))
    leaves = next(tier for tier in topology.tiers if tier.name == "leaf").switches
    assert sum(1 for group in leaves.values() if set(group) & set(chosen)) == 1
    assert check_ranks(plan) is None
