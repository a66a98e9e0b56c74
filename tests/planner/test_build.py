"""The main line and its neighbours: exact groups, GPUs and levels. Its bytes stand in
tests/golden."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.plan import from_json, to_json
from orchestrator.planner.advice import warnings

from . import shapes
from .configs import H100, cluster, main_line, planned

GIB = 1 << 30


def test_a_plan_goes_round_through_json():
    assert from_json(to_json(main_line())) == main_line()


def test_tensor_parallel_groups_are_whole_nodes():
    plan = main_line()
    assert plan.groups["tp"] == [list(range(8 * node, 8 * node + 8)) for node in range(8)]
    for group in plan.groups["tp"]:
        assert len({plan.ranks[rank].node for rank in group}) == 1
        assert [plan.ranks[rank].gpu for rank in group] == list(range(8))
    assert plan.placement["tp"].worst_level == "nvlink"


def test_every_pipeline_is_under_one_leaf():
    plan = main_line()
    assert plan.parallel.dp == 2
    leaf = plan.cluster.levels[0]
    under = {
        plan.cluster.node_names[node]: index
        for index, block in enumerate(leaf.switches)
        for node in block
    }
    assert len(plan.groups["pp"]) == 16
    for group in plan.groups["pp"]:
        assert len({under[plan.ranks[rank].node] for rank in group}) == 1
    assert plan.placement["pp"].worst_level == "leaf"
    assert plan.placement["dp"].worst_level == "spine"
    assert plan.groups["dp"] == [[rank, rank + 32] for rank in range(32)]


def test_memory_adds_up_and_zero_one_shards_only_the_optimizer():
    unsharded = planned(shapes.llama3_70b(), {"tp": 8, "pp": 4, "zero": 0}).memory
    sharded = main_line().memory
    for m in (unsharded, sharded):
        assert m.total == m.params + m.grads + m.optimizer + m.activations + m.buffers
    assert unsharded.optimizer == 2 * sharded.optimizer and unsharded.params == sharded.params


@pytest.mark.parametrize(
    ("gpu", "mfu", "matmul", "warned"),
    [
        ("H100-80GB", 0.57, "", True),
        ("H100-80GB", 0.55, "", False),
        ("H100-80GB", 0.57, "fp8_block", False),
        ("H200-141GB", 0.57, "", True),
        ("GB200-NVL72", 0.4, "", True),
        ("B200-180GB", 0.38, "", False),
        ("V100-32GB", 0.43, "", True),
        ("nobody-measured", 0.62, "", False),
        ("nobody-measured", 0.63, "", True),
    ],
)
def test_a_dense_16_bit_plan_above_the_best_ever_measured_says_so(gpu, mfu, matmul, warned):
    plan = main_line()
    cluster = structs.replace(plan.cluster, gpu=structs.replace(plan.cluster.gpu, name=gpu))
    plan = structs.replace(
        plan, mfu=mfu, cluster=cluster, job=structs.replace(plan.job, matmul=matmul)
    )
    assert any("best ever measured" in line for line in warnings(plan)) == warned


@pytest.mark.parametrize(
    ("precision", "warned"), [("fp64", False), ("fp32", False), ("bf16", True), ("fp16", True)]
)
def test_only_a_16_bit_plan_is_compared_with_it(precision, warned):
    plan = structs.replace(main_line(), mfu=0.9)
    train = structs.replace(plan.job.train, precision=precision)
    plan = structs.replace(plan, job=structs.replace(plan.job, train=train))
    assert any("best ever measured" in line for line in warnings(plan)) == warned


@pytest.mark.parametrize(
    "degrees", [{"tp": 8, "pp": 4}, {"tp": 8, "zero": 3}, {"tp": 4, "pp": 4, "ep": 2}]
)
@pytest.mark.parametrize(("spare", "fits"), [(1.0, False), (1.05, False), (1.08, True)])
def test_a_card_is_not_filled_to_its_last_byte(degrees, spare, fits):
    """The driver and holes between tensors take some of it: 7 % in all."""
    model = shapes.mixtral_8x7b() if "ep" in degrees else shapes.llama3_70b()
    needs = planned(model, degrees).memory.total
    card = H100 | {"memory_gib": needs * spare / GIB}
    plan = planned(model, degrees, cluster(gpu=card))
    assert plan.memory.total == needs
    assert (plan.memory.total <= plan.memory.capacity) == fits
    assert any("does not fit" in line for line in warnings(plan)) != fits
    assert plan.memory.sd > 0, "its total has an interval"


def test_a_cpu_ranks_share_of_memory_may_be_filled():
    memory = planned(shapes.llama3_8b(), {"tp": 8}, cluster(device="cpu")).memory
    assert (memory.capacity, memory.sd) == (int(H100["memory_gib"] * GIB), 0.0)
