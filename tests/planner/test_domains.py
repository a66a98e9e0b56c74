"""NVLink domains that groups do not divide: no group that fits straddles, the rest is idle, and the
plan says so."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.accuracy.predict.hardware import Network, cluster_of
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.backends.slurm.script.flags import network_flags
from orchestrator.cluster.build import build_cluster
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan.cluster import check_cluster
from orchestrator.plan.document import Cluster
from orchestrator.plan.domains import Domains, cut, domains_of
from orchestrator.plan.supported import broken
from orchestrator.plan.trained import case_of
from orchestrator.planner.build import build_plan
from orchestrator.planner.elastic.next_plan import next_plan
from orchestrator.planner.elastic.replan import replan
from orchestrator.planner.elastic.sizes import plan_sizes
from orchestrator.planner.placement.node_placement import reorder
from orchestrator.planner.placement.rank_assignment import used_node_count

from . import configs, shapes

NVL72 = ("cluster=gb200_nvl72x8", "model=deepseek_v3", "train.global_batch_samples=9216")


def racks(sizes: list[int], gpus: int = 4) -> Cluster:
    """Racks of these many nodes, each one NVLink domain and one leaf: full racks without the nodes
    that are broken."""
    rack_size = max(sizes)
    nodes = rack_size * len(sizes)
    levels = [("leaf", rack_size, 1.0), ("spine", nodes, 1.0)]
    full_cluster = build_cluster(configs.cluster(nodes, gpus, levels, domain_nodes=rack_size))
    node_indices = [
        rack * rack_size + node for rack, size in enumerate(sizes) for node in range(size)
    ]
    return cut(full_cluster, node_indices)


def plan_on(cluster: Cluster, parallel: dict, samples: int):
    model = shapes.mixtral_8x7b()
    model = structs.replace(
        model, heads=48, kv_heads=48, head_dim=64, moe=structs.replace(model.moe, experts=96)
    )
    model = structs.replace(
        model, ffn_hidden=18432, moe=structs.replace(model.moe, ffn_hidden=18432)
    )
    train = {"seq_len": 9216, "global_batch_samples": samples}
    return build_plan(
        configs.config(configs.cluster(), model, parallel, **train), cluster, any_layout=True
    )


def straddling(plan, axes: tuple[str, ...]) -> int:
    """Groups in which only `axes` vary that have ranks in several NVLink domains, counted on the
    rank map."""
    index = {name: node for node, name in enumerate(plan.cluster.node_names)}
    domain = {
        node: number for number, nodes in enumerate(plan.cluster.nvlink_domains) for node in nodes
    }
    seen: dict[tuple, set[int]] = {}
    for rank in plan.ranks:
        fixed = tuple(
            getattr(rank.coord, axis) for axis in ("tp", "cp", "ep", "pp", "dp") if axis not in axes
        )
        seen.setdefault(fixed, set()).add(domain[index[rank.node]])
    return sum(len(group_domains) > 1 for group_domains in seen.values())


@st.composite
def jobs(draw):
    """(cluster, degrees without dp). Racks of one size, one or two of them with broken trays;
    single nodes too."""
    gpus, rack = draw(st.sampled_from([(4, 18), (4, 9), (4, 2), (4, 1), (8, 1), (2, 5), (1, 7)]))
    count = draw(st.integers(1, 4))
    broken_trays = draw(st.lists(st.integers(0, min(2, rack - 1)), min_size=count, max_size=count))
    cluster = racks([rack - lost for lost in broken_trays], gpus)
    degrees = {}
    room = domains_of(cluster).gpus
    for axis, limit in {"tp": 16, "ep": 32, "cp": 4, "pp": 4}.items():
        among = [degree for degree in (1, 2, 3, 4, 6, 8, 16, 32) if degree <= min(limit, room)]
        degrees[axis] = draw(st.sampled_from(among))
        room //= degrees[axis]
    return cluster, degrees


@given(jobs(), st.randoms())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_group_that_fits_straddles_and_names_do_not_matter(job, rng):
    cluster, degrees = job
    domains = domains_of(cluster)
    replica = degrees["tp"] * degrees["cp"] * degrees["ep"] * degrees["pp"]
    samples = max(1, domains.filled(**degrees) // replica) * degrees["ep"] * 4
    try:
        plan = plan_on(cluster, degrees | {"zero": 1}, samples)
    except OrchError as error:
        # what is left to refuse: ranks that fill no whole nodes, or groups that fit nowhere
        assert re.search("rule '(gpus|nvlink|kv_heads|heads)'", error.message), error.message
        return
    assert check_cluster(plan.cluster) is None and plan.cluster.node_names != []
    assert max(Counter((rank.node, rank.gpu) for rank in plan.ranks).values()) == 1
    per_node = Counter(rank.node for rank in plan.ranks).values()
    assert set(per_node) == {cluster.gpus_per_node}, "nodes are used whole"
    assert straddling(plan, ("tp",)) == 0
    if domains.unit(degrees["tp"] * degrees["ep"]) <= domains.largest:
        assert straddling(plan, ("tp", "ep")) == 0
    outer = plan.parallel.order[3:]
    if domains.inner_group(**degrees) == degrees["tp"] * degrees["ep"] * degrees["cp"] and {
        *outer
    } == {"pp", "dp"}:
        assert straddling(plan, ("tp", "ep", "cp")) == 0
    idle = domains.gpus - plan.parallel.world_size
    assert bool(idle) == any(
        line.endswith(f"{idle} GPU{'s' * (idle > 1)} idle as spares") for line in plan.warnings
    )
    assert broken(case_of(plan)) is None, "the trainer takes what the planner takes"

    names = [f"other-{number}" for number in rng.sample(range(1000), len(cluster.node_names))]
    renamed = plan_on(structs.replace(cluster, node_names=names), degrees | {"zero": 1}, samples)
    new = dict(zip(cluster.node_names, names, strict=True))
    assert [rank.node for rank in renamed.ranks] == [new[rank.node] for rank in plan.ranks]
    assert renamed.time == plan.time and renamed.placement == plan.placement


@pytest.mark.parametrize(
    ("gpus", "nodes", "usable"),
    [
        (4, 18, {1: 72, 8: 72, 16: 64, 32: 64, 64: 64, 20: 60, 6: 72, 72: 72, 73: 0}),
        (4, 9, {8: 32, 16: 32, 32: 32, 36: 36}),
        (4, 2, {6: 0, 8: 8, 3: 0, 16: 0}),
        (8, 1, {3: 0, 6: 0, 4: 8, 8: 8, 16: 0}),  # a part of a node is not used
        (4, 1, {4: 4, 2: 4, 3: 0}),
    ],
)
def test_the_part_of_a_domain_that_whole_groups_use(gpus, nodes, usable):
    domains = Domains(gpus, ((nodes, 1),))
    assert {group: domains.usable(group) for group in usable} == usable


LINE = (
    "64 of each NVLink domain's 72 GPUs are used: groups of {} do not divide 72; 64 GPUs idle as"
    " spares"
)


@pytest.mark.parametrize("ep", [8, 16, 32, 64])
def test_expert_groups_stay_in_their_rack(ep):
    config = load([*NVL72, f"parallel=ep{ep}_pp4_zero1"])
    plan = build_plan(config, build_cluster(config.cluster), any_layout=True)
    assert plan.placement["ep"].worst_level == "nvlink" and straddling(plan, ("ep",)) == 0
    idle = [line for line in plan.warnings if "idle as spares" in line]
    assert idle == ([LINE.format(ep)] if ep > 8 else [])
    assert used_node_count(plan) == (128 if ep > 8 else 144) and len(plan.cluster.node_names) == 144
    flags = network_flags(plan, SlurmOptions(topology="block"))
    assert flags["segment"] == (16 if ep > 8 else 2)
    assert plan.certificate.bound_s <= plan.time.step_s


@pytest.mark.parametrize(
    ("layout", "world", "line"),
    [
        ("ep32_pp2_dp8", 512, LINE.format(32)),
        (
            "ep32_pp2_dp4",
            256,
            "256 of 576 GPUs are used: groups of 32 do not divide 72.*dp=4 copies.*; 320 GPUs idle",
        ),
        (
            "ep32_pp2_dp9",
            0,
            (
                "'nvlink': tp=1 x ep=32 groups .* take 512 of 576 GPUs, dp=9 576 .*nearest legal:"
                " pp2_dp8_ep32"
            ),
        ),
        ("tp16_pp4_dp9", 0, "'nvlink': tp=16 groups .* take 512 of 576 GPUs, dp=9 576"),
        ("ep64_pp9", 0, "'nvlink': .*nearest legal: pp8_ep64"),
        ("tp8_pp9_dp4", 0, "'gpus': .* = 288 ranks on 144 nodes x 4 GPUs = 576; nearest legal"),
        ("tp8_pp16", 512, LINE.format(16)),
        ("tp8_dp64", 512, LINE.format(16)),
        ("tp8_pp9", 576, ""),
    ],
)
def test_dp_given_and_left_out(layout, world, line):
    config = load([*NVL72, f"parallel={layout}"])
    if not world:
        with pytest.raises(OrchError, match=line):
            build_plan(config, build_cluster(config.cluster), any_layout=True)
        return
    plan = build_plan(config, build_cluster(config.cluster), any_layout=True)
    assert plan.parallel.world_size == world
    idle = [warning for warning in plan.warnings if "idle" in warning]
    assert len(idle) == bool(line) and (not line or re.search(line, idle[0]))


def test_straddling_is_asked_for():
    config = load([*NVL72, "parallel=ep32_pp2_dp9", "parallel.allow_tp_across_nvlink=true"])
    plan = build_plan(config, build_cluster(config.cluster), any_layout=True)
    assert plan.parallel.world_size == 576 and plan.placement["ep"].worst_level != "nvlink"


@pytest.mark.parametrize("seed", [1, 2])
def test_nodes_that_the_scheduler_grants_in_any_order(seed):
    """The ranks of a plan on 16 of 18 trays find whole groups among the granted nodes, spares or
    not."""
    config = load([*NVL72, "parallel=ep32_pp4_zero1"])
    plan = build_plan(config, build_cluster(config.cluster), any_layout=True)
    used = {plan.cluster.node_names.index(rank.node) for rank in plan.ranks}
    for granted in (cut(plan.cluster, used), plan.cluster):
        order = list(range(len(granted.node_names)))
        random.Random(seed).shuffle(order)
        again = replan(plan, reorder(granted, order))
        assert straddling(again, ("ep",)) == 0 and again.time.step_s <= plan.time.step_s * 1.001


def test_elastic_sizes_are_those_that_ranks_use():
    overrides = [
        "cluster=gb200_nvl72x8",
        "cluster.nodes=36",
        "model=llama3_8b",
        "parallel=tp16_zero1",
        "nodes=24..36",
    ]
    config = load([*overrides, "train.global_batch_samples=1024"], ranges=True)
    planned_sizes = plan_sizes(config, build_cluster, any_memory=True)
    assert [(size.nodes, used_node_count(size.plan)) for size in planned_sizes.legal] == [
        (32, 32),
        (28, 28),
        (24, 24),
    ]
    assert "use 32 of these nodes" in planned_sizes.refused[36]
    plans = {size.nodes: size.plan for size in planned_sizes.legal}
    healthy = list(plans[32].cluster.node_names)
    assert len(healthy) == 36 and next_plan(plans[32], plans, healthy) == plans[32], (
        "nothing changes"
    )
    lost = plans[32].ranks[0].node
    healed = next_plan(plans[32], plans, [node for node in healthy if node != lost])
    assert used_node_count(healed) == 32 and straddling(healed, ("tp",)) == 0, (
        "a spare of the same rack takes over"
    )
    fewer = next_plan(plans[32], plans, healthy[:31])
    assert used_node_count(fewer) == 28 and straddling(fewer, ("tp",)) == 0


@pytest.mark.parametrize(
    ("gpus", "domains"), [(512, [64] * 8), (576, [72] * 8), (144, [72] * 2), (64, [64]), (8, [8])]
)
def test_rows_of_a_table_take_equal_parts_of_racks(gpus, domains):
    cluster = cluster_of("GB200", gpus, 4, Network(None, None, None, 72, None, slow=False))
    assert [4 * len(nodes) for nodes in cluster.nvlink_domains] == domains
