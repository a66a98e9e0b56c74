"""Waits for a card are waits where there is none: torch raises before it calls the driver."""

from __future__ import annotations

import pytest

from benchmarks.card import card_words, sheet_flops
from benchmarks.gpu_node.cases import SMALL, Where, plan_of
from orchestrator.cost.parameters import generation_of
from tests.beds import fakegpu
from tests.bench import card_steps


@pytest.fixture(scope="module")
def steps():
    if reason := fakegpu.missing():
        pytest.skip(reason)
    return fakegpu.call(card_steps.everything)


@pytest.mark.process
def test_a_steady_step_waits_nowhere_and_a_wait_is_named(steps):
    waits = steps["waits"]
    assert waits["steady"] == dict.fromkeys(card_steps.LAYOUTS, "")
    assert waits["experts"].startswith("model/permutation.py:")
    assert waits["elsewhere"].startswith("card_steps.py:")
    assert waits["elsewhere"].endswith(" read")
    (copy,) = waits["copies"]
    assert waits["elsewhere"] == f"{copy} read"
    assert waits["other"] == "another error" and waits["mode"] == 0


@pytest.mark.process
def test_ranks_that_share_a_model_wait_nowhere_in_a_steady_step(steps):
    assert steps["ranks"] == {name: ["", ""] for name in card_steps.SHARED}


@pytest.mark.process
def test_an_engine_that_is_done_gives_its_memory_back(steps):
    """It held weights and gradients through the hooks of its parameters, so a row that followed
    another on a card had less memory, and a higher peak."""
    assert steps["bytes"] == [0, 0]


@pytest.mark.parametrize(
    ("name", "gpu", "memory_gib", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB", 79.6, 989e12),
        ("NVIDIA H200", "H200", 140.4, 989e12),
        ("NVIDIA H100 PCIe", "H100-PCIe", 79.6, 756e12),
    ],
)
def test_a_plan_is_for_the_card_that_is_measured(name, gpu, memory_gib, flops):
    assert sheet_flops(name) == flops
    plan = plan_of(SMALL, ("parallel=dp1", *card_words(name)), 1, Where(dry=False, cuda=True))
    assert plan.cluster.gpu.name == gpu and plan.cluster.gpu.peak_flops["bf16"] == flops
    assert plan.cluster.gpu.memory_bytes == pytest.approx(memory_gib * (1 << 30))
    assert generation_of(plan.cluster.gpu.name, "cuda") == "hopper"


def test_a_card_that_is_not_known_is_planned_as_the_cluster_says():
    assert card_words("RTX PRO 6000 Blackwell") == () and sheet_flops("cpu") is None
