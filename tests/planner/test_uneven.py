"""Replicas that take unequal numbers of micro-batches, and other pipeline depths: what is left when
nodes are lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cluster.resolve import resolve
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.observe.pages.plan_page import render
from orchestrator.plan import PlanError, batch, seal
from orchestrator.planner.elastic.sizes import plan_sizes
from tests.beds.plans import make_plan

from .configs import build_plan

SIXTEEN = ("train.global_batch_samples=16", "parallel.micro_batch_size=1")
CPU = ("cluster=local", "model=tiny", "cluster.gpus_per_node=1")


def sizes(*overrides: str):
    return plan_sizes(load([*CPU, *overrides], ranges=True), resolve)


counts = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@given(counts)
def test_every_micro_batch_of_a_step_is_one_replicas(shares):
    sample_indices = [batch.firsts(shares, replica) for replica in range(len(shares))]
    assert [len(indices) for indices in sample_indices] == shares and all(
        indices == sorted(indices) for indices in sample_indices
    )
    assert sorted(index for indices in sample_indices for index in indices) == list(
        range(sum(shares))
    )


@given(st.integers(1, 12), st.integers(0, 200))
def test_shares_are_as_equal_as_can_be(replicas, many):
    shares = batch.share(many, replicas)
    assert sum(shares) == many and len(shares) == replicas and max(shares) - min(shares) <= 1
    if min(shares):  # as where they are equal: round by round
        assert [batch.firsts(shares, replica)[0] for replica in range(replicas)] == list(
            range(replicas)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"replica_micro_batches": [2, 2, 1]},
            "take 5 samples per step, global_batch_samples is 4",
        ),
        ({"replica_micro_batches": [3, 1, 0]}, "at least 1"),
        ({"replica_micro_batches": [3, 1]}, "must be 3 numbers"),
        ({"replica_micro_batches": [2, 1, 1], "micro_batches": 3}, "largest be micro_batches 3"),
        ({"replica_micro_batches": []}, "take 6 samples"),
        ({"replica_micro_batches": [2, 2, 2], "global_batch_samples": 6}, "must differ"),
    ],
)
def test_a_plan_whose_replicas_contradict_the_batch_is_not_sealed(change, message):
    plan = make_plan(dp=3, replica_micro_batches=[2, 1, 1])
    with pytest.raises(PlanError, match=message):
        seal(structs.replace(plan, parallel=structs.replace(plan.parallel, **change)))


def test_the_slowest_replica_is_what_is_planned_for():
    overrides = [*CPU, "parallel=zero1", "cluster.nodes=3", "parallel.micro_batch_size=1"]
    uneven = build_plan(load([*overrides, "train.global_batch_samples=16", "parallel.uneven=true"]))
    full = build_plan(load([*overrides, "train.global_batch_samples=18"]))
    assert uneven.parallel.replica_micro_batches == [6, 5, 5] and uneven.parallel.micro_batches == 6
    assert (uneven.time.step_s, uneven.memory.total) == (full.time.step_s, full.memory.total)
    assert uneven.tokens_per_s_per_gpu == pytest.approx(full.tokens_per_s_per_gpu * 16 / 18)
    assert batch.idle(uneven.parallel) == pytest.approx(1 / 9)
    page = " ".join(render(uneven).split())
    assert "6+5+5 micro-batches of 1 on 3 replicas, which are idle for 11.1% of the time" in page
    divisible = build_plan(
        load([*overrides, "train.global_batch_samples=18", "parallel.uneven=true"])
    )
    assert divisible == full, "what divides is divided"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.global_batch_samples=2"], "2 samples does not split"),
        (
            ["train.global_batch_samples=16", "parallel.micro_batch_size=3"],
            "16 samples does not split",
        ),
        (
            [*SIXTEEN, "parallel=pp2", "cluster.nodes=6", "parallel.schedule=dualpipe"],
            (
                "replicas take 5 or 6 micro-batches: schedule dualpipe wants an even micro_batches,"
                " not 5"
            ),
        ),
        (
            [*SIXTEEN, "+train.batch_ramp={start_samples: 3, over_samples: 100}"],
            "train.batch_ramp grows the batch in whole micro-batches",
        ),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises(OrchError, match=message):
        build_plan(load([*CPU, "cluster.nodes=3", "parallel.uneven=true", *overrides]))


def test_experts_are_exchanged_by_all_replicas_alike():
    overrides = [
        "cluster=h100x64",
        "model=mixtral_8x7b",
        "parallel=ep8_pp2_zero1",
        "train.seq_len=8192",
    ]
    with pytest.raises(
        OrchError, match="ep=8: the all-to-all of experts joins the replicas in every micro-batch"
    ):
        build_plan(load([*overrides, "train.global_batch_samples=100", "parallel.uneven=true"]))


# ------------------------------------------------------------------------------------------- sizes


def test_an_unequal_split_must_be_faster_than_parking_nodes():
    planned_sizes = sizes("nodes=1..8", "cluster.nodes=8", *SIXTEEN)
    shares = {size.nodes: size.plan.parallel.replica_micro_batches for size in planned_sizes.legal}
    assert shares == {8: [], 6: [3, 3, 3, 3, 2, 2], 4: [], 3: [6, 5, 5], 2: [], 1: []}
    assert "2 or 3 micro-batches, which is no faster than 6 nodes" in planned_sizes.refused[7]
    assert "3 or 4 micro-batches, which is no faster than 4 nodes" in planned_sizes.refused[5]
    steps = [size.plan.time.step_s for size in planned_sizes.legal]
    assert steps == sorted(steps)


def test_another_pipeline_depth_comes_last():
    planned_sizes = sizes(
        "nodes=1..4", "cluster.nodes=4", "parallel=pp4", "parallel.stage_layers=[1,1,1,1]"
    )
    shape = {
        size.nodes: (size.plan.parallel.pp, size.plan.parallel.dp) for size in planned_sizes.legal
    }
    assert shape[4] == (4, 1) and all(
        pp * dp == nodes and pp < 4 for nodes, (pp, dp) in shape.items() if nodes < 4
    )
    assert sorted(shape) == [1, 2, 3, 4] and not planned_sizes.refused
    for nodes in (2, 3):
        size = next(size for size in planned_sizes.legal if size.nodes == nodes)
        assert build_plan(size.config) == size.plan, (
            "the configuration of a size is that of its plan"
        )
        depth_plan = (
            sizes(f"nodes={nodes}..{nodes}", "cluster.nodes=4", f"parallel=pp{nodes}").legal[0].plan
        )
        assert size.plan.time.step_s <= depth_plan.time.step_s, "the fastest of them"
    depth_two_sizes = sizes("nodes=1..4", "cluster.nodes=4", "parallel=pp2")
    assert {size.nodes: size.plan.parallel.pp for size in depth_two_sizes.legal} == {
        4: 2,
        2: 2,
        1: 1,
    }
    assert "not a multiple" in depth_two_sizes.refused[3], (
        "two nodes at the job's own depth and a spare come before another depth"
    )


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(8, 40),
    st.sampled_from([None, 1, 2]),
)
def test_every_size_trains_on_the_same_samples_with_the_same_tensor_parallelism(
    tp, pp, samples, micro_batch
):
    overrides = [
        f"parallel=tp{tp}_pp{pp}_zero1",
        f"train.global_batch_samples={samples}",
        "cluster.gpus_per_node=2",
    ]
    overrides += [f"parallel.micro_batch_size={micro_batch}"] if micro_batch else []
    try:
        planned_sizes = sizes(*overrides, "cluster.nodes=5", "nodes=1..5")
    except OrchError as error:
        assert "no legal size" in error.message
        return
    full_depth_nodes = [size.nodes for size in planned_sizes.legal if size.plan.parallel.pp == pp]
    for nodes, _, plan in planned_sizes.legal:
        par = plan.parallel
        assert par.tp == tp and par.global_batch_samples == samples == par.micro_batch_size * sum(
            batch.taken(par)
        )
        assert par.pp == pp or nodes < min(full_depth_nodes)
        assert par.world_size == 2 * nodes and micro_batch in (None, par.micro_batch_size)
    assert {size.nodes for size in planned_sizes.legal} | planned_sizes.refused.keys() == set(
        range(1, 6)
    )
