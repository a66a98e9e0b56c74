"""fp16 with dynamic loss scaling: skips what overflows, finds a scale, grows again, and trains what
fp32 trains."""

from __future__ import annotations

import math

import pytest
import torch

from tests.beds.plans import make_plan
from tests.reference import adamw as naive
from tests.reference import single
from trainer.comm.mesh import Mesh
from trainer.engine import Engine
from trainer.optim.loss_scale import LOWEST, LossScale
from trainer.precision import recipe
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import step_batches

FINITE = torch.tensor(True)
NOT_FINITE = torch.tensor(False)


def test_the_scale_halves_grows_and_stops_at_the_bottom():
    scaler = LossScale(initial=8.0, growth_interval=3)
    scales = []
    for finite in (True, True, False, True, True, True, True):
        scaler.update(torch.tensor(finite))
        scales.append(scaler.scale)
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]  # an overflow starts the count anew
    for _ in range(40):
        assert scaler.scale >= LOWEST
        scaler.update(NOT_FINITE)
    assert scaler.scale == LOWEST


def test_state_goes_through_a_checkpoint():
    first = LossScale(initial=4.0, growth_interval=3)
    second = LossScale(growth_interval=3)
    first.update(FINITE), first.update(FINITE)
    second.restore(first.state())
    first.update(FINITE), second.update(FINITE)
    assert first.scale == second.scale == 8.0
    second.restore({})
    assert second.scale == 8.0


def steps(rank: int, plan, initial: float, count: int) -> list[dict]:
    """`count` steps; what each saw and left behind on this rank."""
    mesh = Mesh.from_plan(plan, rank) if plan.parallel.world_size > 1 else Mesh.alone(plan)
    engine = Engine(plan, mesh, torch.device("cpu"), recipe(plan.job.train))
    if engine.scaler is not None:
        engine.scaler.scale = initial
    record = []
    for step in range(count):
        before = {info.name: weight.clone() for info, weight in engine.buckets.full_params()}
        batches, valid = step_batches(plan, mesh.coord, step * plan.parallel.global_batch_samples)
        scale = engine.loss_scale
        _, norm = engine.gradients(batches, valid)
        grads = {name: grad / scale for name, grad in engine.buckets.full_grads().items()}
        applied = bool(engine.update(norm, 1e-3))
        engine.buckets.wait_params()
        after = {info.name: weight.clone() for info, weight in engine.buckets.full_params()}
        moved = any(not torch.equal(before[name], after[name]) for name in after)
        entry = {
            "applied": applied,
            "moved": moved,
            "scale": scale,
            "steps": engine.optimizer.step_count,
        }
        record.append(entry | {"norm": float(norm), "grads": grads, "weights": after})
    for piece in engine.state_pieces(to_write=False):
        if piece.kind == "master":
            record[-1].setdefault("master", []).append([piece.info.name, piece.offset, piece.data])
    return record


def test_overflow_skips_until_the_scale_fits_and_gradients_are_those_of_fp32():
    plan = make_plan(precision="fp16", steps=20)
    plain = make_plan(steps=20)
    entries = steps(0, plan, initial=2.0**24, count=12)
    skipped = [entry for entry in entries if not entry["applied"]]
    assert 0 < len(skipped) < 10
    for index, entry in enumerate(entries):
        assert entry["applied"] == math.isfinite(entry["norm"]) == entry["moved"]
        assert entry["steps"] == index + 1 - len(
            [e for e in entries[: index + 1] if not e["applied"]]
        )
    scales = [entry["scale"] for entry in entries]
    assert scales == [
        2.0**24 / 2 ** len([e for e in entries[:i] if not e["applied"]])
        for i in range(len(entries))
    ]
    fits = steps(0, plan, initial=2.0**10, count=1)[0]
    truth = steps(0, plain, 1.0, 1)[0]
    assert fits["applied"] and fits["norm"] == pytest.approx(truth["norm"], rel=5e-3)
    for name, grad in truth["grads"].items():
        assert (fits["grads"][name] - grad).abs().max() <= 2e-2 * grad.abs().max(), name


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_step_that_is_not_finite_leaves_no_trace(broken, zero):
    """Nor in the padding of a bucket, which is scaled with the gradients and which no later
    gradient overwrites."""
    plan = make_plan(precision="bf16", zero=zero)
    engine = Engine(plan, Mesh.alone(plan), torch.device("cpu"), recipe(plan.job.train))
    batches, valid = step_batches(plan, engine.mesh.coord, 0)
    _, usual = engine.gradients(batches, valid)
    for bucket in engine.buckets.buckets:
        bucket.grad_shard[0] = broken
    before = [
        tensor.clone() for tensor in (*engine.optimizer.tensors(), *engine.buckets.param_tensors())
    ]
    assert not engine.update(torch.tensor(broken, dtype=torch.float64), 1e-3)
    for old, new in zip(
        before, (*engine.optimizer.tensors(), *engine.buckets.param_tensors()), strict=True
    ):
        assert torch.equal(old, new)
    assert engine.optimizer.step_count == 0
    _, again = engine.gradients(batches, valid)
    assert torch.equal(usual, again)
    assert engine.update(again, 1e-3) and engine.optimizer.step_count == 1


def test_small_gradients_survive_only_with_a_scale():
    """What loss scaling is for: at scale 2^-10 more of the gradient is zero than at 2^10."""
    plan = make_plan(precision="fp16")

    def zeros(initial: float) -> int:
        return sum(
            int((grad == 0).sum()) for grad in steps(0, plan, initial, 1)[0]["grads"].values()
        )

    assert zeros(2.0**-10) > zeros(2.0**10)


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2},
        {"dp": 2, "zero": 3},
        {"tp": 2},
        {"pp": 2, "schedule": "zb_h1"},
        {"cp": 2, "cp_method": "zigzag"},
    ],
    ids=str,
)
def test_all_ranks_skip_together(layout):
    plan = make_plan(precision="fp16", micro_batches=2, **layout)
    results = run_ranks(steps, 2, plan, 2.0**22, 9)
    applied = [[entry["applied"] for entry in result] for result in results]
    assert applied[0] == applied[1] and not applied[0][0] and applied[0][-1]
    assert [entry["scale"] for entry in results[0]] == [entry["scale"] for entry in results[1]]


@pytest.mark.process
@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_follows_an_fp32_master(zero):
    """bf16 weights round away steps smaller than their resolution; the master remembers. The master
    is the naive optimizer's on the gradients that were reduced, the weights are its rounding, and
    all ranks agree to the bit."""
    plan = make_plan(dp=2, zero=zero, precision="bf16")
    first, second = run_ranks(steps, 2, plan, 1.0, 2)
    optim = plan.job.optim
    optimizer = naive.AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    master = {
        name: weight.float()
        for name, weight in single.initial_weights(plan, torch.bfloat16).items()
    }
    for first_entry, second_entry in zip(first, second, strict=True):
        assert {grad.dtype for grad in first_entry["grads"].values()} == {torch.float32}
        master = optimizer.step(
            master, naive.clipped(first_entry["grads"], plan.job.train.clip_grad_norm), 1e-3
        )
        for name, weight in first_entry["weights"].items():
            assert weight.dtype == torch.bfloat16 and torch.equal(
                weight, second_entry["weights"][name]
            )
    for name, start, values in (*first[-1]["master"], *second[-1]["master"]):
        span = slice(start, start + len(values))
        torch.testing.assert_close(values, master[name].flatten()[span], rtol=1e-5, atol=1e-7)
        assert torch.equal(values.bfloat16(), first[-1]["weights"][name].flatten()[span])
