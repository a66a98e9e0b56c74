"""The memory of NCCL's communicators against figures that others have published."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.cost.memory.communicators import (
    FAR,
    MIB,
    NEAR,
    Group,
    collective_bytes,
    communicator_bytes,
    transfer_bytes,
)
from orchestrator.cost.memory.rank_memory import context_bytes
from orchestrator.cost.workload import Workload
from orchestrator.observe.pages.plan_page import explanation
from orchestrator.planner.explain import explain
from tests.planner import configs, shapes

H100 = 18  # NVLinks


def test_an_all_to_all_of_eight_h100s():
    """NCCL's issue 1685: 32 channels to each of 7 peers; memory grew from 1.06 to 4.34 GB."""
    node = Group(8, 8)
    assert transfer_bytes(node, 7, H100) == 7 * 32 * (10 + 2) * MIB
    assert transfer_bytes(node, 7, H100) == pytest.approx(4.34e9 - 1.06e9, rel=0.15)


def test_the_channels_of_logs():
    """Issues 1781 (two H100s: 24), 892 (H800s, 8 links: 16) and 1189 (2 x 2 over a network: 8)."""
    assert collective_bytes(Group(2, 2), H100) == 24 * NEAR
    assert collective_bytes(Group(8, 8), 8) == 2 * 16 * NEAR
    assert collective_bytes(Group(4, 2), H100) == 2 * 8 * (NEAR + FAR) / 2


def test_a_group_over_more_nodes_holds_no_more():
    """Beyond two nodes it does not grow (sjeaugey in issue 986), but for a table of all ranks."""
    assert collective_bytes(Group(16, 8), H100) == collective_bytes(Group(4096, 8), H100)
    assert transfer_bytes(Group(16, 8), 15, H100) >= transfer_bytes(Group(4096, 8), 4095, H100)


def test_a_plan_names_the_memory_of_its_communicators():
    model = shapes.mixtral_8x7b()
    cluster = configs.cluster(1, 8)
    plans = [
        configs.planned(model, parallel, cluster)
        for parallel in ({"ep": 8, "zero": 1}, {"tp": 8, "zero": 1})
    ]
    for plan in plans:
        workload = Workload(plan.model, plan.parallel, plan.job.train)
        bytes_in_all = (1 << 30) + communicator_bytes(workload, plan.cluster)
        assert context_bytes(plan.memory, "cuda") == plan.memory.context == bytes_in_all
    by_experts, by_tensors = (plan.memory.context for plan in plans)
    assert by_experts - by_tensors == 7 * 32 * NEAR, "its all-to-all; the sums are of as many ranks"
    config = configs.config(cluster, model, {"ep": 8, "zero": 1})
    explained = explain(config, plans[0].cluster, plans[0])
    page = explanation(explained, plans[0].time.step_s, width=200)
    assert "memory: 4.19 GiB of the buffers are the device's context and NCCL's" in page


def test_one_gpu_and_cpus_have_no_communicators():
    plan = configs.planned(shapes.llama3_8b(), {"zero": 0}, configs.cluster(1, 1))
    assert plan.memory.context == 1 << 30
    on_cpus = structs.replace(plan.cluster, device="cpu")
    workload = Workload(plan.model, structs.replace(plan.parallel, world_size=8), plan.job.train)
    assert communicator_bytes(workload, on_cpus) == 0
