"""The main line and its neighbours: exact groups, GPUs and levels. Its bytes stand in tests/golden."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.plan import from_json, to_json
from orchestrator.planner.advice import warnings

from . import shapes
from .configs import main_line, planned


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
    under = {plan.cluster.node_names[node]: index for index, block in enumerate(leaf.switches) for node in block}
    assert len(plan.groups["pp"]) == 16
    for group in plan.groups["pp"]:
        assert len({under[plan.ranks[rank].node] for rank in group}) == 1
    assert plan.placement["pp"].worst_level == "leaf"
    assert plan.placement["dp"].worst_level == "spine"
    assert plan.groups["dp"] == [[rank, rank + 32] for rank in range(32)]


def test_memory_adds_up_and_zero_one_shards_only_the_optimizer():
    whole, sharded = planned(shapes.llama3_70b(), {"tp": 8, "pp": 4, "zero": 0}).memory, main_line().memory
    for m in (whole, sharded):
        assert m.total == m.params + m.grads + m.optimizer + m.activations + m.buffers
    assert whole.optimizer == 2 * sharded.optimizer and whole.params == sharded.params


@pytest.mark.parametrize(
    ("gpu", "mfu", "matmul", "said"),
    [
        *(("H100-80GB", 0.57, "", True), ("H100-80GB", 0.55, "", False), ("H100-80GB", 0.57, "fp8_block", False)),
        *(("H200-141GB", 0.57, "", True), ("GB200-NVL72", 0.4, "", True), ("B200-180GB", 0.38, "", False)),
        *(("V100-32GB", 0.43, "", True), ("nobody-measured", 0.62, "", False), ("nobody-measured", 0.63, "", True)),
    ],
)
def test_a_dense_16_bit_plan_above_the_best_ever_measured_says_so(gpu, mfu, matmul, said):
    plan = main_line()
    cluster = structs.replace(plan.cluster, gpu=structs.replace(plan.cluster.gpu, name=gpu))
    plan = structs.replace(plan, mfu=mfu, cluster=cluster, job=structs.replace(plan.job, matmul=matmul))
    assert any("best ever measured" in line for line in warnings(plan)) == said


@pytest.mark.parametrize(("precision", "said"), [("fp64", False), ("fp32", False), ("bf16", True), ("fp16", True)])
def test_only_a_16_bit_plan_is_compared_with_it(precision, said):
    plan = structs.replace(main_line(), mfu=0.9)
    train = structs.replace(plan.job.train, precision=precision)
    plan = structs.replace(plan, job=structs.replace(plan.job, train=train))
    assert any("best ever measured" in line for line in warnings(plan)) == said
