"""Step time: pipeline algebra against the papers and against the schedule simulator; what hides
what."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cost.model.stages import rank_stages
from orchestrator.cost.of_plan import cost_of, pipeline_timeline
from orchestrator.cost.profile import shipped
from orchestrator.cost.time.pipeline import span_seconds
from orchestrator.plan.schedules import Costs, build, simulate
from tests.beds.plans import make_plan, tiny_model

from . import configs, shapes
from .configs import main_line, planned

SHIPPED = shipped()


def parallel(pp: int, m: int, vpp: int = 1, schedule: str = "1f1b"):
    return make_plan(
        model=tiny_model(layers=pp * vpp), pp=pp, vpp=vpp, micro_batches=m, schedule=schedule
    ).parallel


@given(st.integers(1, 8), st.integers(1, 32))
@settings(max_examples=40, deadline=None)
def test_equal_stages_have_the_published_bubble(pp, m):
    _, ratio = span_seconds(parallel(pp, m), [1.0] * pp, [2.0] * pp)
    assert ratio == pytest.approx((pp - 1) / m)


@given(st.integers(2, 6), st.integers(1, 5), st.integers(2, 3))
@settings(max_examples=30, deadline=None)
def test_interleaving_divides_the_bubble(pp, rounds, vpp):
    par = parallel(pp, rounds * pp, vpp, "interleaved")
    _, ratio = span_seconds(par, [1.0] * pp * vpp, [2.0] * pp * vpp)
    assert ratio == pytest.approx((pp - 1) / (vpp * rounds * pp))


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=5), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_unequal_stages_are_what_the_whole_schedule_gives(stages, m):
    """They agree to a percent: two slow stages that are nearly equal (2.0 and 1.94) take many
    micro-batches to settle."""
    pp = len(stages)
    span, ratio = span_seconds(parallel(pp, m), stages, [2 * s for s in stages])
    exact = simulate(build("1f1b", pp, m), Costs(tuple(stages), tuple(stages), tuple(stages)))
    assert span == pytest.approx(exact.makespan, rel=1e-2)
    assert ratio == pytest.approx(exact.bubble_ratio, rel=2e-2, abs=1.2e-2)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("zb_h1", 1), ("zb_h2", 1), ("zbv", 2), ("dualpipev", 2)]
)
def test_other_schedules_are_simulated_and_extended(schedule, vpp):
    stages = 4 * vpp
    full = simulate(build(schedule, 4, 96, vpp), Costs(1.0, 1.0, 1.0)).makespan
    span, _ = span_seconds(parallel(4, 96, vpp, schedule), [1.0] * stages, [2.0] * stages)
    assert span == pytest.approx(full, rel=1e-9)


def test_v_shaped_schedules_put_the_ends_of_the_model_together():
    assert rank_stages(parallel(2, 4, 2, "zbv")) == [(0, 3), (1, 2)]
    assert rank_stages(parallel(2, 4, 2, "interleaved")) == [(0, 2), (1, 3)]
    assert rank_stages(parallel(2, 4, 1, "dualpipe")) == [(0, 1), (1, 0)]


def test_parts_of_a_step_add_up():
    plan = main_line()
    time = main_line().time
    exposed_s = time.compute_s + sum(time.exposed_comm_s.values())
    assert 0 <= time.step_s - exposed_s < 0.1 * time.step_s  # the rest is the bubble
    assert plan.tokens_per_s_per_gpu * 64 * time.step_s == pytest.approx(
        plan.parallel.global_batch_tokens
    )
    assert 0.2 < plan.mfu < 0.803  # gemm_mamf: the best measured H100 matmul


def test_timeline_shows_the_plan_s_own_stage_times():
    plan = main_line()
    drawn = pipeline_timeline(main_line(), 16)
    assert drawn.schedule.micro_batches == 16 and len(drawn.spans) == 4
    # 512 micro-batches on the slowest rank are most of the step, beside the jitter of many nodes
    busy = max(drawn.busy) / 16 * plan.parallel.micro_batches * cost_of(plan).factor
    assert busy == pytest.approx(plan.time.step_s, rel=0.02)


def time_of(**parallel):
    return planned(shapes.llama3_8b(), parallel).time


def test_more_tensor_parallelism_costs_time():
    steps = [time_of(tp=tp, zero=1).step_s for tp in (2, 4, 8)]
    assert steps == sorted(steps)


def test_gradients_hide_behind_the_last_backward_in_buckets_that_are_not_too_small():
    size = 2 * 8.03e9 * 4
    values = SHIPPED.values  # bytes: the whole model's gradients there and back
    sent = size / min(
        8 * 50e9 * values["nic"], 450e9 * values["nvlink"]
    )  # a node's NICs, or NVLink to them
    shown = values["dp.fsdp"]  # of it no compute hides
    assert time_of(zero=0, bucket_mib=1600).exposed_comm_s["dp"] == pytest.approx(
        shown * sent, rel=0.1
    )
    # tiny buckets pay the latency of 64 ranks each time, and more than a backward can hide
    assert time_of(zero=0, bucket_mib=1).exposed_comm_s["dp"] > sent


def test_doubling_tp_costs_more_than_doubling_pp():
    """planning.md C3, Llama3-70B on 32 H100: TP4PP4 704 TF, TP4PP8 668 (-5 %), TP8PP4 509 (-28
    %)."""
    model = shapes.llama3_70b()
    cluster = configs.cluster(4, levels=[("leaf", 4, 1.0)])
    base, deeper, wider = (
        planned(
            model, {"tp": tp, "pp": pp, "zero": 1}, cluster, global_batch_samples=128
        ).tokens_per_s_per_gpu
        for tp, pp in ((4, 4), (4, 8), (8, 4))
    )
    assert wider < deeper < base


def test_few_micro_batches_are_named_as_the_limit():
    plan = planned(shapes.llama3_70b(), {"tp": 8, "pp": 8, "zero": 1}, global_batch_samples=8)
    assert "bubble" in plan.time.limited_by
    assert any("pipeline bubble" in warning for warning in plan.warnings)
    busy_s = plan.time.compute_s + sum(plan.time.exposed_comm_s.values())
    assert plan.time.bubble_ratio == pytest.approx(
        1 - busy_s / plan.time.step_s
    )  # the one on the page, too
    assert plan.time.bubble_ratio == pytest.approx(7 / 15, rel=0.1)


def test_zero_three_pays_for_gathering_every_micro_batch():
    optimizer_sharded, fully_sharded = (
        planned(shapes.llama3_8b(), {"zero": z}, global_batch_samples=64) for z in (1, 3)
    )
    sent = [
        sum(plan.placement["dp"].bytes_per_step_by_level.values())
        for plan in (optimizer_sharded, fully_sharded)
    ]
    assert sent[1] > sent[0]
    # bf16 weights; the shard of ZeRO-3 is fp32, it is the master copy too
    assert fully_sharded.memory.params * 64 == pytest.approx(
        2 * optimizer_sharded.memory.params, rel=0.01
    )
