"""Multi-token prediction in the plan: whose work and memory it is, and what is refused."""

from __future__ import annotations

import pytest
from msgspec import UNSET, structs

from orchestrator.config.compose import load
from orchestrator.cost.model.layers import layer_params, parameter_count, prediction_params
from orchestrator.cost.model.stages import rank_parameters
from orchestrator.plan.document import Mtp
from orchestrator.plan.flops import model_flops_per_token
from tests.planner.configs import build_plan

WORDS = ("cluster=h100x64", "model=llama3_8b", "parallel=tp2_pp4_zero1")


def plan_of(*overrides):
    return build_plan(load(list(overrides)))


def planned(*overrides, depth):
    return plan_of(*WORDS, *overrides, *([f"model.mtp={{depth: {depth}}}"] if depth else []))


def test_it_is_work_and_parameters_of_the_last_stage_alone():
    alone, ahead = (planned("parallel.stage_layers=[8,8,8,8]", depth=depth) for depth in (0, 2))
    held = [rank_parameters(plan.model, plan.parallel) for plan in (alone, ahead)]
    assert held[0][:-1] == held[1][:-1]
    model = ahead.model
    table = 128256 * 4096 // 2
    block = layer_params(model, 31)
    extra_parameters = (
        2 * (block.attention + block.ffn) // 2
        + 2 * (block.replicated + prediction_params(model))
        + table
    )
    assert held[1][-1] == (held[0][-1][0] + extra_parameters, 0)
    assert ahead.time.step_s > alone.time.step_s


def test_the_last_stage_gets_fewer_layers():
    alone = planned(depth=0)
    ahead = planned(depth=1)
    assert ahead.parallel.stage_layers[-1] < alone.parallel.stage_layers[-1]


def test_parameters_and_flops_are_those_of_a_layer_a_projection_and_the_head():
    model = planned(depth=1).model
    alone = structs.replace(model, mtp=UNSET)
    assert parameter_count(model) - parameter_count(alone) == layer_params(
        model, 31
    ).total + prediction_params(model)
    weights = 2 * 4096**2 + 128256 * 4096 + 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 14336
    extra_flops = model_flops_per_token(model, 8192) - model_flops_per_token(alone, 8192)
    assert extra_flops == pytest.approx(6 * weights + 3 * 4 * 8192 / 2 * 32 * 128)


def test_depth_0_is_no_key_of_the_plan():
    assert planned(depth=0).hash == plan_of(*WORDS, "model.mtp={depth: 0}").hash
    assert planned(depth=1).model.mtp == Mtp(depth=1, weight=0.3)
