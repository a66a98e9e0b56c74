"""Buckets that are bounded whatever the model (ZeRO-R's CB, arXiv 1910.02054, section 6.2): larger
parameters are cut, with the same sums to the bit, and a model four times as large takes the same
buffers."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.compose import load
from orchestrator.cost.memory.rank_memory import constant_buffers
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.trained import refusal
from tests.beds.plans import make_plan, tiny_model
from tests.planner.configs import build_plan
from tests.trainer.samples import engine_of
from tests.trainer.test_buckets_layout import BUCKET, SHARDS, SIZES, items_of
from tests.trainer.test_planned_memory import LLAMA
from tests.trainer.together import run_together, told
from trainer.data.order import samples_of_step
from trainer.metrics.memory import StepMemory
from trainer.parallel.data.layout import ALIGN, SHARD_ALIGN, make_layout
from trainer.verify.samples import micro_batch

BOUND = 16 << 10  # bytes; the token table of the small model has eight times as many
LAYOUTS = {
    "zero0": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero1 on the host": {"dp": 2, "zero": 1, "offload": {"optimizer": "host"}},
    "tp2": {"tp": 2},
    "pp2 zb_h1": {"pp": 2, "micro_batches": 4, "schedule": "zb_h1"},
}


def plan_of(layout: dict, bound: int, model: dict = LLAMA) -> Plan:
    bucket_bytes = bound or 1 << 16
    fields = {"bucket_bytes": bucket_bytes, "comm_buffer_bytes": bound} | layout
    return make_plan(model=tiny_model(**model), seq_len=64, **fields)


@given(SIZES, SHARDS, BUCKET, st.integers(1, 5))
def test_no_bucket_is_larger_than_the_bound_and_each_element_is_owned_once(
    sizes, shards, bucket_numel, units
):
    most = units * ALIGN * shards * SHARD_ALIGN
    held = {index: [0] * numel for index, (numel, _) in enumerate(sizes)}
    for bucket in make_layout(items_of(sizes), shards, bucket_numel, most):
        assert bucket.numel <= most and bucket.numel % (shards * SHARD_ALIGN) == 0
        for index in range(shards):
            low, high = bucket.shard(index, shards)
            for slot, start, stop in bucket.param_ranges(index, shards):
                assert low <= slot.start + start < slot.start + stop <= high
                for element in range(start, stop):
                    held[slot.index][element] += 1
    assert all(set(counts) == {1} for counts in held.values())


def trained(rank: int, layout: dict) -> dict:
    """Two steps with and without the bound: gradients and weights, and the largest messages."""
    outcome = {}
    for bound in (0, BOUND):
        engine = engine_of(plan_of(layout, bound), rank)
        for step in range(2):
            rows = samples_of_step(engine.plan.parallel, engine.mesh.coord, step)
            batches = [micro_batch(engine.plan, row) for row in rows]
            norm = engine.gradients(batches, 100)[1]
            grads = engine.buckets.full_grads()
            engine.update(norm, 1e-3)
        engine.buckets.wait_params()
        outcome[str(bound)] = {
            "grads": grads,
            "weights": {info.name: param for info, param in engine.buckets.full_params()},
            "largest": max(bucket.layout.numel * 4 for bucket in engine.buckets.buckets),
        }
    return outcome


@pytest.mark.process
def test_cut_parameters_have_the_same_gradients_and_weights():
    arguments = {name: (case,) for name, case in LAYOUTS.items()}
    for name, answers in run_together(trained, 2, arguments).items():
        with told(name):
            for answer in answers:
                whole = answer["0"]
                cut = answer[str(BOUND)]
                assert cut["largest"] <= BOUND < whole["largest"]
                assert cut["grads"].keys() == whole["grads"].keys()
                for kind in ("grads", "weights"):
                    for key, tensor in whole[kind].items():
                        torch.testing.assert_close(cut[kind][key], tensor, rtol=1e-5, atol=1e-7)


#: Four times as many parameters: twice as wide.
WIDE = LLAMA | {"hidden": 128, "head_dim": 32, "ffn_hidden": 320, "vocab": 1024}


def buffer_bytes(rank: int, model: dict) -> int:
    """Bytes of the buffers of a rank's messages after two steps."""
    engine = engine_of(plan_of({"dp": 2, "zero": 2}, BOUND, model), rank)
    memory = StepMemory.of_engine(engine)
    for step in range(2):
        rows = samples_of_step(engine.plan.parallel, engine.mesh.coord, step)
        with memory.measure({}):
            engine.gradients([micro_batch(engine.plan, row) for row in rows], 100)
    lasting = memory.points()[0].held["buffers"]
    assert lasting == sum(tensor.nbytes for tensor in engine.buckets.buffer_tensors())
    return lasting


@pytest.mark.process
def test_a_model_four_times_as_large_takes_the_same_buffers():
    models = {"small": LLAMA, "large": WIDE}
    plans = {name: plan_of({"dp": 2, "zero": 2}, BOUND, model) for name, model in models.items()}
    assert plans["large"].model.parameters > 3.9 * plans["small"].model.parameters
    planned = {name: constant_buffers(Workload.of_plan(plan)) for name, plan in plans.items()}
    measured = run_together(buffer_bytes, 2, {name: (model,) for name, model in models.items()})
    assert planned["small"] == planned["large"] == 4 * BOUND
    assert {name: set(sizes) for name, sizes in measured.items()} == {
        name: {size} for name, size in planned.items()
    }


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["parallel=dp8_zero3"], "gathers whole layers; legal: zero=0 to 2"),
        (["parallel=dp8_zero1", "train.comm_buffer_mib=0.0001"], "legal: from 0.0005"),
    ],
)
def test_what_the_trainer_cannot_bound_is_refused_in_one_line(overrides, reason):
    plan = build_plan(load(["cluster=h100x8", "train.comm_buffer_mib=32", *overrides]))
    assert reason in refusal(plan)
    assert any(reason in warning for warning in plan.warnings)


def test_whole_matrices_are_not_cut():
    with pytest.raises(OrchError, match="kind=adamw or sgd") as error:
        build_plan(load(["cluster=h100x8", "train.comm_buffer_mib=32", "optim.kind=muon"]))
    assert error.value.exit == 65


def test_smaller_messages_have_a_price_and_other_plans_do_not_name_them():
    words = ["cluster=h100x8", "parallel=dp8_zero1"]
    plain = build_plan(load(words))
    bounded = build_plan(load([*words, "train.comm_buffer_mib=1"]))
    assert b"comm_buffer" not in msgspec.json.encode(plain)
    assert bounded.parallel.bucket_bytes == 1 << 20 < plain.parallel.bucket_bytes
    assert bounded.time.step_s > plain.time.step_s
    unchanged = build_plan(load([*words, "train.comm_buffer_mib=4096"]))
    assert unchanged.parallel == plain.parallel and unchanged.time == plain.time
