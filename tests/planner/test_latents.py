"""`train.recompute_latents`: what it costs, what it saves, and where it changes nothing."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from orchestrator.config.compose import load
from orchestrator.plan.flops import hardware_flops_per_token, up_weights
from tests.planner.configs import build_plan

DEEPSEEK = (
    "cluster=h800x2048",
    "model=deepseek_v3",
    "parallel=pp16_ep64_dp2",
    "train.recompute=selective",
)


def plan(*overrides: str):
    return build_plan(load(list(overrides)))


def test_a_plan_with_latents_again_takes_less_memory_and_more_time():
    stored = plan(*DEEPSEEK)
    again = plan(*DEEPSEEK, "train.recompute_latents=true")
    assert stored.job.train.recompute_latents is UNSET and again.job.train.recompute_latents is True
    assert again.memory.activations < 0.8 * stored.memory.activations
    assert stored.time.step_s < again.time.step_s < 1.1 * stored.time.step_s
    assert not [line for line in again.warnings if "recompute_latents" in line]


def test_hardware_flops_count_the_products_that_run_again():
    model = plan(*DEEPSEEK).model
    assert model.mla is not None
    heads = 128 * (128 + 64)
    latents = 1536
    assert up_weights(model) == latents * heads + 512 * 128 * (128 + 128)
    plain, recomputed = (
        hardware_flops_per_token(model, 4096, "selective", (), again) for again in (False, True)
    )
    assert recomputed - plain == 2 * up_weights(model) * 61
    assert hardware_flops_per_token(model, 4096, "full", (), True) == hardware_flops_per_token(
        model, 4096, "full"
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("model=llama3_8b", "train.recompute=selective"),
            "model llama3_8b has no latent attention",
        ),
        (
            ("model=tiny_mla", "train.recompute=full"),
            "train.recompute=full; it belongs to selective",
        ),
    ],
)
def test_where_it_changes_nothing_is_said(overrides, reason):
    latent_plan = plan(
        "cluster=h100x8", "parallel=dp8_zero3", *overrides, "train.recompute_latents=true"
    )
    assert f"train.recompute_latents changes nothing: {reason}" in latent_plan.warnings
