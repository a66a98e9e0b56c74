"""All pods or none without Kueue and without chosen nodes: Kubernetes' own gang scheduling, on a
real control plane."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.beds.kubernetes.bed import Bed, Shape
from tests.beds.kubernetes.runs import Orch
from tests.beds.kubernetes.simulate import LEVELS

from .conftest import bring_up

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]
OPTIONS = {"image": "orch.test/none:1", "levels": LEVELS, "controller": "never"}


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with bring_up(Shape(simulated=12, gangs=True)) as started_bed:
        yield started_bed


@pytest.mark.parametrize("gang", ["workload", "auto"])
def test_a_run_waits_whole_until_all_of_it_finds_room(bed, tmp_path, gang):
    orch = Orch(bed, tmp_path, "default", {**OPTIONS, "gang": gang})
    for index in range(6):  # twelve nodes, of which eight are wanted
        bed.kubectl("cordon", f"sim-{index}")
    try:
        run = orch.submit("+cluster=h100x64", "parallel=tp8_pp4_zero1")
        bed.wait(lambda: len(orch.pods(run.id)) == 8, 120, "eight pods")
        time.sleep(10)
        assert [pod["spec"].get("nodeName") for pod in orch.pods(run.id)] == [None] * 8
        assert bed.get("workloads.scheduling.k8s.io", run.id)["spec"]["podGroups"][0]["policy"][
            "gang"
        ] == {"minCount": 8}
        for index in range(6):
            bed.kubectl("uncordon", f"sim-{index}")
        assert len({pod["spec"]["nodeName"] for pod in orch.bound(run.id, 8)}) == 8
    finally:
        for index in range(6):
            bed.kubectl("uncordon", f"sim-{index}")
    orch("cancel", "--force", run.id)
    group_query = ("get", "workloads.scheduling.k8s.io", "-o", "name")
    bed.wait(lambda: not bed.kubectl(*group_query), 120, "end of its group")
