"""nodes=A..B: whole replicas only, the same global batch at every size."""

from __future__ import annotations

import pytest

from orchestrator.cluster.resolve import resolve
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.planner.elastic.sizes import plan_sizes

JOB = ("+cluster=h100x64", "model=llama3_8b")


def sizes(*overrides: str, any_memory: bool = False):
    return plan_sizes(load([*JOB, *overrides], ranges=True), resolve, any_memory)


def test_whole_replicas_with_the_same_batch():
    planned_sizes = sizes("parallel=tp8_pp2", "nodes=4..8")
    assert [(size.nodes, size.plan.parallel.dp) for size in planned_sizes.legal] == [
        (8, 4),
        (6, 3),
        (4, 2),
    ]
    assert {size.plan.parallel.global_batch_samples for size in planned_sizes.legal} == {1024}
    assert [size.plan.parallel.micro_batches for size in planned_sizes.legal] == [256, 342, 512], (
        "accumulation takes the rest"
    )
    assert [size.plan.parallel.replica_micro_batches for size in planned_sizes.legal] == [
        [],
        [342, 341, 341],
        [],
    ]
    assert all(
        len(size.plan.cluster.node_names) == size.nodes == size.config.cluster.nodes
        for size in planned_sizes.legal
    )
    assert all(size.config.nodes is None for size in planned_sizes.legal)
    assert "replica of 16" in planned_sizes.refused[7] and list(planned_sizes.refused) == [7, 5]


def test_one_size_without_a_range():
    (only,) = sizes("parallel=tp8_pp2").legal
    assert (only.nodes, only.plan.parallel.dp) == (8, 4)


def test_ragged_switches_are_cut():
    levels = "{name: leaf, nodes_per_switch: [3,1,4], gbit_per_s: 400, latency_us: 5, source: test}"
    top = "{name: spine, nodes_per_switch: 8, gbit_per_s: 400, latency_us: 5, source: test}"
    legal_sizes = sizes("parallel=tp8_pp2", "nodes=4..8", f"cluster.levels=[{levels},{top}]").legal
    cut = [[len(switch) for switch in size.plan.cluster.levels[0].switches] for size in legal_sizes]
    assert cut == [[3, 1, 4], [3, 1, 2], [3, 1]]


def test_auto_finds_one_layout_for_all_sizes():
    legal_sizes = sizes("parallel=auto", "nodes=4..8", "train.global_batch_samples=768").legal
    degrees = {(s.plan.parallel.tp, s.plan.parallel.pp, s.plan.parallel.zero) for s in legal_sizes}
    assert len(legal_sizes) > 1 and len(degrees) == 1


def test_memory_counts_unless_told_otherwise():
    overrides = ("model=llama3_70b", "parallel=tp8_pp2_zero1", "nodes=2..8", "train.seq_len=6144")
    every = sizes(*overrides, any_memory=True).legal
    fitting_sizes = sizes(*overrides)
    fits = [s.nodes for s in every if s.plan.memory.total <= s.plan.memory.capacity]
    assert [s.nodes for s in every] == [8, 6, 4, 2] and fits == [8, 6, 4]
    assert [s.nodes for s in fitting_sizes.legal] == [*fits, 3], (
        "a deeper pipeline fits where that of the job does not"
    )
    assert (
        all(s.plan.memory.total <= s.plan.memory.capacity for s in fitting_sizes.legal)
        and "GiB of" in fitting_sizes.refused[2]
    )


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["parallel=tp8_pp2_dp2", "nodes=4..8"], Exit.USAGE, "leave dp=2 out"),
        (["parallel=tp8_pp2", "nodes=8..4"], Exit.USAGE, "smaller number comes first"),
        (
            ["parallel=tp8_pp8", "nodes=2..3"],
            Exit.CONFIG,
            "with 3: 24 GPUs are not a multiple of a model replica of 64",
        ),
        (
            ["nodes=9..10"],
            Exit.CONFIG,
            "with 10: cluster h100x64 has 8 nodes; cluster.nodes=10 gives it more",
        ),
        (
            ["nodes=4..8", "+train.batch_ramp={start_samples: 64, over_samples: 4096}"],
            Exit.USAGE,
            "steps of its own",
        ),
        (["nodes=4..8", "cluster.topology_file=x.conf"], Exit.USAGE, "says which nodes there are"),
    ],
)
def test_refusals(overrides, code, message):
    with pytest.raises(OrchError, match=message) as refused:
        sizes(*overrides)
    assert refused.value.exit == code


def test_only_who_takes_ranges_gets_them():
    with pytest.raises(OrchError, match=r"cluster\.nodes=N"):
        load([*JOB, "nodes=4..8"])
    with pytest.raises(OrchError, match=r"like 4\.\.8"):
        load([*JOB, "nodes=4-8"], ranges=True)
