"""What ZeRO costs and saves, measured: bytes sent a step (arXiv 1910.02054, section 7) and held a
rank (section 5)."""

from __future__ import annotations

import pytest
import torch

from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from trainer.precision import Recipe
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

pytestmark = pytest.mark.process

#: Every dimension divides by 4 ranks, so that Psi is exact; 64-element alignment pads only the
#: norms.
MODEL = tiny_model(vocab=256, hidden=64, heads=4, head_dim=16, ffn_hidden=128)
#: The paper's mixed precision: 2 bytes of weight, 2 of gradient, K = 12 of fp32 weight and two
#: moments.
MIXED = Recipe(torch.bfloat16, torch.bfloat16, torch.float32)


def measure(rank: int, plan) -> dict:
    engine = engine_of(plan, rank, MIXED)
    par = plan.parallel
    most_whole = 0
    if par.zero == 2:  # watch the whole gradient buffers come and go
        send = engine.buckets._send

        def watched(number: int) -> None:
            nonlocal most_whole
            most_whole = max(most_whole, sum(b.grads is not None for b in engine.buckets.buckets))
            send(number)

        engine.buckets._send = watched
    sent = []
    for step in range(3):  # the first settles lazy state; the others must cost the same
        engine.counter.take()
        batches = [
            micro_batch(plan, [step * par.micro_batches + i]) for i in range(par.micro_batches)
        ]
        _, norm = engine.gradients(batches, 10)
        engine.update(norm, 1e-3)
        engine.buckets.wait_params()
        sent.append(engine.counter.take()[0].get("dp", 0))
    groups = (engine.buckets.param_tensors, engine.buckets.grad_tensors, engine.optimizer.tensors)
    held = [sum(tensor.nbytes for tensor in group()) for group in groups]
    rest = sum(
        info.numel
        for info, _ in engine.buckets.full_params()
        if not info.name.startswith("layers.")
    )
    count = len(engine.buckets.buckets)
    return {"sent": sent, "held": held, "rest": rest, "whole": most_whole, "buckets": count}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.full), 4])
def test_bytes_sent_and_held(n, micro_batches):
    psi = MODEL.parameters
    many = micro_batches
    for zero in range(4):
        plan = make_plan(model=MODEL, dp=n, zero=zero, micro_batches=many, bucket_bytes=1 << 14)
        for result in run_ranks(measure, n, plan):
            rest = result["rest"]
            assert rest == 2 * 256 * 64 + 64
            # in elements; weights and gradients both travel in bf16
            times = {0: 2 * psi, 1: 2 * psi, 2: (many + 1) * psi, 3: many * (3 * psi - rest)}[zero]
            assert set(result["sent"]) == {times * 2 * (n - 1) // n}, f"zero{zero}"
            params, grads, optimizer = result["held"]
            if zero < 3:
                assert params == 2 * psi
                assert grads == 2 * psi // (n if zero == 2 else 1)
                assert optimizer == 12 * psi // (n if zero else 1)
            else:
                # the shards are the fp32 master, gradients are kept with them: (4 + 4 + 8) = (2 + 2
                # +
                # 12)
                assert params + grads + optimizer == 16 * psi // n
            if zero == 2:
                assert 0 < result["whole"] < result["buckets"] / 2


def test_hybrid_sends_shards_inside_and_sums_them_across():
    """4 ranks in groups of 2: a reduce-scatter and an all-gather over 2, an all-reduce of half of
    Psi over 2."""
    psi = MODEL.parameters
    for zero in (1, 2):
        plan = make_plan(
            model=MODEL, dp=4, zero=zero, zero_group=2, micro_batches=1, bucket_bytes=1 << 14
        )
        for result in run_ranks(measure, 4, plan):
            assert set(result["sent"]) == {2 * (psi // 2 + psi // 2 + psi // 2)}
            assert result["held"][2] == 12 * psi // 2


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_zero3_under_a_pipeline_gathers_once_a_step(schedule):
    """Weights once, gradients once a micro-batch; each rank of the pipeline for its own stage."""
    plan = make_plan(model=MODEL, dp=2, pp=2, zero=3, schedule=schedule, micro_batches=3)
    results = run_ranks(measure, 4, plan)
    stage_psi = (
        MODEL.parameters - 64
    ) // 2  # embedding and head are alike; the last stage has the final norm
    for result in results:
        assert {sent // (1 + 3) for sent in result["sent"]} <= {stage_psi, stage_psi + 64}
