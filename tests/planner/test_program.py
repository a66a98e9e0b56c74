"""A user's program is planned without a model: ranks, groups, placement, and nothing that only a
model could tell."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from orchestrator.cluster.resolve import resolve
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.observe.pages.plan_page import render
from orchestrator.plan import AXES, PlanError, from_json, seal, to_json
from orchestrator.plan.document import NO_MODEL, Cluster
from orchestrator.plan.trained import problems, refusal
from orchestrator.planner.elastic.next_plan import larger_plan, next_plan, pays
from orchestrator.planner.elastic.replan import difference
from orchestrator.planner.elastic.sizes import plan_sizes
from orchestrator.planner.program import plan_program

OF_A_MODEL = {"model", "memory", "time", "mfu", "tokens_per_s_per_gpu"}


def described(spec) -> Cluster:
    return resolve(spec)


def plan_of(*overrides: str):
    config = load(list(overrides), ranges=True)
    return plan_program(config, described(config.cluster))


def sizes_of(*overrides: str):
    return plan_sizes(load(list(overrides), ranges=True), described, program=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8])
def test_any_number_of_ranks_that_the_cluster_has(ranks):
    plan = plan_of(f"nproc={ranks}")
    assert [(rank.node, rank.gpu) for rank in plan.ranks] == [
        (f"node-{i // 4}", i % 4) for i in range(ranks)
    ]
    assert plan.groups["dp"] == [list(range(ranks))]
    assert plan.placement["dp"].worst_level == (
        "self" if ranks == 1 else "nvlink" if ranks <= 4 else "host"
    )


def test_named_axes_give_groups_and_the_innermost_the_fastest_links():
    plan = plan_of("cluster=h100x64", "parallel=tp8_pp2")
    assert {axis: getattr(plan.parallel, axis) for axis in AXES} == {
        "tp": 8,
        "cp": 1,
        "ep": 1,
        "pp": 2,
        "dp": 4,
    }
    levels = {axis: plan.placement[axis].worst_level for axis in AXES}
    assert levels == {"tp": "nvlink", "cp": "self", "ep": "self", "pp": "leaf", "dp": "spine"}
    read = plan_of("parallel=tp2_zero2").parallel
    assert (read.zero, read.vpp, read.sp) == (2, 1, False)  # for the program to read
    turned = plan_of("cluster=h100x64", "parallel=tp8_pp2", "parallel.order=[dp,pp,tp,cp,ep]")
    assert turned.groups["dp"][0] == [0, 1, 2, 3] and turned.placement["tp"].worst_level == "spine"
    assert turned.warnings == ["tensor-parallel groups cross spine: slower than inside a node"]


def test_nothing_of_a_model_is_in_the_document_or_on_the_page():
    plan = plan_of("parallel=tp2")
    document = json.loads(to_json(plan))
    assert document["program"] is True and not OF_A_MODEL & document.keys()
    assert document["job"].keys() == {"checkpoint", "metrics"}
    again = from_json(to_json(plan))
    assert again == plan and again.model is NO_MODEL
    for term in ("tiny", "MFU", "memory", "tokens", "step", "batch"):
        assert term not in render(plan), term
    assert "program" in (refusal(plan) or "") and list(problems(plan))


def test_a_plan_is_either_a_program_s_or_has_a_model():
    """A plan of a model whose model was cut out of it is no program's plan, and the other way
    round."""
    plan = plan_of("parallel=tp2")
    with pytest.raises(PlanError, match="the plan of a user's program has no model"):
        seal(structs.replace(plan, program=False))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["nproc=9"], "9 ranks need more than cluster local has (2 nodes x 4 = 8)"),
        (["nproc=3", "parallel=tp2"], "3 ranks are not a multiple of tp 2 = 2"),
        (["nproc=4", "parallel=dp2"], "nproc=4 is not what parallel gives: 2 ranks"),
        (["parallel=auto"], "parallel=auto needs a model"),
        (["parallel.schedule=gpipe"], "parallel.schedule means nothing without a model"),
        (
            ["parallel.micro_batch_size=2"],
            "parallel.micro_batch_size means nothing without a model",
        ),
        (["nodes=1..2", "nproc=4"], "leave nproc and dp out"),
        (["nodes=1..3"], "cluster local has 2 nodes"),
        (["nodes=1..2", "parallel=tp3"], "no legal size"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(overrides, line):
    with pytest.raises(OrchError) as refused:
        sizes_of(*overrides)
    assert line in refused.value.message and "\n" not in refused.value.message


def test_nproc_is_refused_where_a_model_is_planned():
    with pytest.raises(OrchError, match="nproc=4 is for a program"):
        plan_sizes(load(["nproc=4"], ranges=True), described)


def test_elastic_sizes_are_those_that_the_axes_fit_and_change_with_the_nodes():
    """tp 4 x pp 2 is two nodes: sizes are 2 and 4. A lost node of four leaves three, so the run
    goes on with two; with all four back it grows, where what it gains by then is more than the
    restart costs."""
    planned_sizes = sizes_of("cluster.nodes=4", "nodes=1..4", "parallel=tp4_pp2")
    assert [size.nodes for size in planned_sizes.legal] == [4, 2] and set(
        planned_sizes.refused
    ) == {1, 3}
    plans = {size.nodes: size.plan for size in planned_sizes.legal}
    names = plans[4].cluster.node_names
    smaller = next_plan(plans[4], plans, set(names) - {"node-1"})
    assert smaller is not None and {rank.node for rank in smaller.ranks} <= set(names) - {"node-1"}
    assert smaller.parallel.world_size == 8 and smaller.program
    assert larger_plan(smaller, plans, 4) is plans[4]
    times = {"stable_s": 60.0, "dwell_s": 30.0}
    assert pays(smaller, plans[4], **times, cost_s=10, horizon_s=30)
    assert not pays(smaller, plans[4], **times, cost_s=10, horizon_s=15)


def test_a_spare_takes_the_place_of_a_lost_node():
    plan = plan_of("cluster.nodes=3", "parallel=tp4_dp2")
    moved = next_plan(plan, {2: plan}, {"node-0", "node-2"})
    assert moved is not None
    assert [rank.node for rank in moved.ranks] == ["node-0"] * 4 + ["node-2"] * 4
    assert difference(plan, moved).text == "on node-[0,2]: every axis on the level that was planned"


def test_one_switch_is_filled_where_the_order_of_nodes_has_no_meaning(tmp_path):
    """Imported nodes: two ranks of nodes that lie under one switch, although the first two in the
    list do not."""
    topology = tmp_path / "topology.conf"
    topology.write_text(
        "SwitchName=a Nodes=n0,n2\nSwitchName=b Nodes=n1,n3,n4\nSwitchName=top Switches=a,b\n"
    )
    overrides = [
        "cluster=h100x64",
        "cluster.nodes=5",
        f"cluster.topology_file={topology}",
        "parallel=tp8_dp3",
    ]
    plan = plan_of(*overrides)
    assert sorted({rank.node for rank in plan.ranks}) == ["n1", "n3", "n4"]
    assert plan.placement["dp"].worst_level == "leaf"
