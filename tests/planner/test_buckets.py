"""The size of gradient buckets: chosen by the layout, or given."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.cost.buckets import LEAST, MIB, bucket_size, unsharded_params
from orchestrator.observe.pages.plan_page import explanation
from orchestrator.planner.explain import explain
from tests.planner import configs, shapes

GRADIENT = 4  # bytes
TWO_TENSORS = {"tp": 2, "zero": 1}


def planned(model, parallel: dict, nodes: int):
    return configs.planned(
        model, parallel, configs.cluster(nodes, 8), global_batch_samples=16 * nodes
    )


def explained(parallel: dict, nodes: int = 1, model=None) -> str:
    config = configs.config(
        configs.cluster(nodes, 8),
        model or shapes.llama3_8b(),
        parallel,
        global_batch_samples=64 * nodes,
    )
    plan = configs.build_plan(config)
    return explanation(explain(config, plan.cluster, plan), plan.time.step_s, width=300)


def test_a_bucket_has_what_megatron_core_sums_at_once():
    plan = planned(shapes.llama3_8b(), TWO_TENSORS, 1)
    assert plan.parallel.bucket_bytes == 40_000_000 * GRADIENT
    assert "gradient buckets: 152.6 MiB: 40 million gradients" in explained(TWO_TENSORS)


def test_every_one_of_many_replicas_has_a_piece():
    plan = planned(shapes.llama3_8b(), TWO_TENSORS, 128)
    assert plan.parallel.dp == 512 == plan.parallel.bucket_bytes // MIB


def test_most_gradients_leave_during_backward():
    """A rank of many stages has few gradients, which still fill eight buckets."""
    parallel = {"tp": 8, "pp": 8, "zero": 1}
    plan = planned(shapes.llama3_8b(), parallel, 16)
    gradients = unsharded_params(plan.model, plan.parallel) * GRADIENT
    assert plan.parallel.bucket_bytes == int(gradients / 8)
    assert "1/8 of the rank's gradients" in explained(parallel, 16)


def test_a_small_model_keeps_the_buckets_of_pytorch():
    plan = planned(shapes.tiny(), {"zero": 1}, 8)
    assert plan.parallel.bucket_bytes == LEAST
    assert "gradient buckets: 25 MiB: the least" in explained({"zero": 1}, model=shapes.tiny())


@pytest.mark.parametrize("mib", [1.0, 1000.0])
def test_a_given_size_stays(mib):
    given = TWO_TENSORS | {"bucket_mib": mib}
    assert planned(shapes.llama3_8b(), given, 2).parallel.bucket_bytes == mib * MIB
    assert f"{mib:g} MiB, as given (the planner's choice: 152.6 MiB)" in explained(given)


def test_layers_and_single_ranks_have_no_buckets():
    assert "gradient buckets" not in explained({"zero": 3})
    assert "gradient buckets" not in explained({"tp": 8})


def test_larger_buckets_shorten_the_step_of_many_replicas():
    chosen, small = (
        planned(shapes.llama3_8b(), TWO_TENSORS | buckets, 128).time.step_s
        for buckets in ({}, {"bucket_mib": 25})
    )
    assert 0.96 * small < chosen < 0.985 * small


@pytest.mark.parametrize("given", [None, 100.0])
def test_bounds_of_the_search_have_the_buckets_of_the_layouts_that_they_bound(given):
    parallel = {"auto": True, "bucket_mib": given}
    config = configs.config(configs.cluster(16, 8), shapes.llama3_8b(), parallel)
    search = configs.search(config)
    checked = 0
    for mesh in search.space.meshes():
        if not search.space.count(mesh):
            continue
        layout = next(iter(search.space.layouts(mesh)))
        placed = search.exact_costs.placed(layout)
        if placed is None:
            continue
        cost = search.layer_costs.of_mesh(mesh, search.par)
        assert cost.in_mesh(mesh).bucket_bytes == placed.parallel.bucket_bytes
        checked += 1
    assert checked > 10


def test_bf16_gradients_are_half_as_many_bytes():
    plan = planned(shapes.llama3_8b(), TWO_TENSORS, 1)
    narrow = bucket_size(plan.model, structs.replace(plan.parallel, zero=0), 2)
    assert narrow.size == 80_000_000
