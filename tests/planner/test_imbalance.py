"""Uneven loads of experts: the planned factor, what it costs in time and memory, and what a run's
own loads teach."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from orchestrator.accuracy.calibrate.update import site_profile, update_with_loads
from orchestrator.cost.of_plan import cost_of, expert_load, step_of
from orchestrator.cost.profile import shipped
from orchestrator.cost.time.imbalance import LEAST_SPREAD, load_factor, spread_name, spread_of
from orchestrator.observe.expert_loads import load_spread, rank_load
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.planner.explain import explain
from orchestrator.planner.search.auto import search

from . import configs, shapes
from .configs import build_plan

BALANCED = {"bias": {"bias_update": 0.001}, "loss": {"balance_loss": 0.01}, "none": {}}


def model(balance: str = "loss", **moe):
    base = shapes.mixtral_8x7b()
    return structs.replace(
        base, layers=4, moe=structs.replace(base.moe, **BALANCED[balance], **moe)
    )


def config(factor=None, balance="loss", software="orch", profile=None, **parallel):
    balanced = configs.config(
        configs.cluster(2, 4), model(balance), {"ep": 4, **parallel}, global_batch_samples=64
    )
    return structs.replace(
        balanced, cost=structs.replace(balanced.cost, expert_imbalance=factor, software=software)
    )


@pytest.mark.parametrize("ep", [2, 4, 16, 64])
def test_the_factor_is_the_fullest_of_ranks_whose_experts_differ_so_much(ep):
    """Loads of 64 experts drawn with a spread, on ep ranks: mean of the fullest over the mean, by
    simulation."""
    spread = 0.2
    experts = 64
    moe = structs.replace(
        shapes.mixtral_8x7b(), moe=structs.replace(model().moe, experts=experts, top_k=2)
    )
    loads = 1 + spread * np.random.default_rng(0).standard_normal((20_000, experts))
    ranks = loads.reshape(-1, ep, experts // ep).mean(axis=2)
    simulated = float((ranks.max(axis=1) / loads.mean(axis=1)).mean())
    par = build_plan(config()).parallel
    factor = load_factor(moe, structs.replace(par, ep=ep, tp=1, cp=1), spread)
    assert factor - 1 == pytest.approx(simulated - 1, rel=0.06)
    assert spread_of(factor, experts, ep) == pytest.approx(spread)


def test_no_rank_gets_more_than_there_is():
    par = build_plan(
        config()
    ).parallel  # ep 4 of 8 experts, top_k 2: at most all tokens on one of four
    assert load_factor(model(), par, 100.0) == 4.0
    assert load_factor(model(experts=8, top_k=4), par, 100.0) == 2.0
    assert (
        load_factor(model(), structs.replace(par, ep=1), 100.0) == 1.0
        and spread_of(1.0, 8, 4) == LEAST_SPREAD
    )


def test_how_a_router_is_balanced_says_which_loads_are_assumed():
    factors = {
        balance: build_plan(config(balance=balance)).parallel.expert_imbalance
        for balance in BALANCED
    }
    assert [spread_name(model(balance).moe) for balance in BALANCED] == [
        f"moe.spread.{name}" for name in BALANCED
    ]
    assert 1 < factors["bias"] < factors["loss"] < factors["none"]
    assert build_plan(config(ep=1, tp=4)).parallel.expert_imbalance is UNSET
    assert build_plan(config(1.3)).parallel.expert_imbalance == 1.3


LAYOUTS = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2]), "pp": st.sampled_from([1, 2]), "zero": st.sampled_from([0, 1])}
    | {
        "etp": st.sampled_from([None, 1]),
        "schedule": st.sampled_from(["1f1b", "zb_h1", "dualpipe"]),
    }
)


@given(LAYOUTS, st.sampled_from(["orch", "deepseek", "megatron"]), st.floats(1.01, 1.9))
@settings(max_examples=25, deadline=None)
def test_even_loads_change_nothing_and_uneven_ones_cost_time_and_memory(layout, software, factor):
    layout = layout | ({"schedule": "1f1b"} if layout["pp"] == 1 else {}) | {"ep": 2}
    even = build_plan(config(1.0, software=software, **layout))
    assert even.parallel.expert_imbalance is UNSET
    again = structs.replace(even, parallel=structs.replace(even.parallel, expert_imbalance=1.0))
    assert cost_of(again).step_s == cost_of(even).step_s, (
        "a factor of 1 is no factor, to the last bit"
    )
    uneven = build_plan(config(factor, software=software, **layout))
    assert (
        uneven.time.step_s > even.time.step_s
        and uneven.memory.activations > even.memory.activations
    )
    assert (
        uneven.placement == even.placement or uneven.parallel.order != even.parallel.order
    )  # bytes are those of even loads
    most_uneven = build_plan(config(factor + 0.05, software=software, **layout))
    assert (
        most_uneven.time.step_s > uneven.time.step_s
        and most_uneven.memory.total >= uneven.memory.total
    )
    state_names = ("params", "grads", "optimizer")
    assert [getattr(uneven.memory, name) for name in state_names] == [
        getattr(even.memory, name) for name in state_names
    ]


def test_the_interval_of_a_step_holds_the_doubt_of_the_loads():
    even = build_plan(config(1.0))
    uneven = build_plan(config())
    assert uneven.time.sd > even.time.sd
    load_report = expert_load(uneven)
    assert (
        1 < load_report.low < load_report.factor < load_report.high <= 4
        and load_report.balanced_by == "loss"
    )
    assert load_report.costs_s == pytest.approx(uneven.time.step_s - even.time.step_s, rel=1e-6)
    assert expert_load(even).costs_s == 0 and expert_load(build_plan(config(ep=1, tp=4))) is None
    cluster = uneven.cluster
    assert explain(config(), cluster, uneven).experts == load_report


def test_the_search_plans_with_the_same_loads_as_a_plan():
    for factor in (None, 1.0, 1.5):
        auto_config = config(factor, auto=True, ep=None)
        best = search(auto_config, build_plan(config()).cluster).front[0]
        plan = build_plan(best.config)
        assert (
            plan.parallel == best.solution.parallel
            and plan.time.step_s == best.solution.time.step_s
        )


def loads_of(tokens: list[list[int]]):
    """Loads of two layers, the same in each; a list a step."""
    return {
        layer: [
            (step, ExpertLoad(tokens=step_tokens, entropy=1.0))
            for step, step_tokens in enumerate(tokens)
        ]
        for layer in (0, 1)
    }


def test_loads_are_read_from_the_second_half_of_a_run():
    plan = build_plan(config())
    loads = loads_of([[80, 0, 0, 0, 0, 0, 0, 0], [13, 13, 11, 11, 10, 10, 6, 6]])
    assert rank_load(plan, loads) == {
        "planned": plan.parallel.expert_imbalance,
        "measured": 26 / 20,
    }
    assert load_spread(loads) == pytest.approx(np.std([13, 13, 11, 11, 10, 10, 6, 6]) / 10)
    assert rank_load(build_plan(config(ep=1, tp=4)), loads) == {}


def test_a_run_s_loads_teach_the_next_plan():
    """After three runs that measured 1.3 the plan assumes nearly that; the parameter that moved is
    that of the router's balancing alone, and plans of models that are balanced otherwise stay as
    they were."""
    profile = shipped()
    plan = build_plan(config())
    for run in range(3):
        change = update_with_loads(profile, model(), 4, 1.3, None)
        moved = [
            name
            for name, by in zip(profile.values, change.log_change, strict=True)
            if abs(by) > 1e-9
        ]
        assert moved == ["moe.spread.loss"]
        profile = site_profile(profile, change, "run", [f"run-{run}"], "", "site")
    cluster = plan.cluster
    from orchestrator.planner.build import build_plan as build

    learned = build(config(), cluster, profile=profile)
    assert learned.parallel.expert_imbalance == pytest.approx(1.3, abs=0.02)
    assert learned.time.sd < plan.time.sd and "moe.spread.loss" in learned.time.parameters
    bias_plan = build(config(balance="bias"), cluster, profile=profile)
    assert (
        bias_plan.parallel.expert_imbalance
        == build_plan(config(balance="bias")).parallel.expert_imbalance
    )
    # the plan's own step follows from what it carries, and moves with the parameter
    values = dict(profile.values)
    assert float(step_of(learned)(values)) == pytest.approx(learned.time.step_s)
    values["moe.spread.loss"] *= 2
    assert float(step_of(learned)(values)) > learned.time.step_s


def test_a_run_on_one_expert_rank_teaches_by_its_experts():
    change = update_with_loads(shipped(), model(), 1, 1.0, 0.5)
    assert math.exp(change.log_change[list(shipped().values).index("moe.spread.loss")]) > 1.4
