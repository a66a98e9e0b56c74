"""Updates that end in the next step: those of the formula in every layout, also after a resume on
another one."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Offload
from tests.beds.plans import make_plan
from tests.planner.configs import build_plan
from tests.reference import single
from tests.trainer.samples import GQA, LLAMA, engine_of, small
from tests.trainer.test_loop import finish, job
from tests.trainer.test_loop_offload import losses
from tests.trainer.workers import running
from trainer.metrics.memory import StepMemory
from trainer.precision import FP64
from trainer.verify.compare import run_rank, with_eps
from trainer.verify.ranks import run_ranks

DELAYED = Offload(optimizer="host", delayed=True)
LAYOUTS = {
    **{f"zero{zero}": {"dp": 2, "zero": zero, "bucket_bytes": 1 << 12} for zero in range(4)},
    "tp2": {"tp": 2, "micro_batches": 4},
    "pp2 zb_h1": {"pp": 2, "micro_batches": 4, "schedule": "zb_h1"},
}
STEPS = 5


def plan_of(layout: str, offload: Offload | None = DELAYED):
    return make_plan(
        model=small(**LLAMA, **GQA, layers=4), steps=STEPS, offload=offload, **LAYOUTS[layout]
    )


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_the_formula(layout):
    plan = with_eps(plan_of(layout), "fp64")
    expected = single.train(plan, STEPS, torch.float64)
    for errors in run_ranks(run_rank, 2, plan, FP64, expected):
        assert errors and max(errors.values()) < 1e-10


def test_the_formula_is_another_training_than_without_delay():
    late, plain = (
        single.train(plan_of("zero1", offload), 3, torch.float64) for offload in (DELAYED, None)
    )
    assert [a.loss == b.loss for a, b in zip(late, plain, strict=True)] == [True, False, False]
    assert torch.equal(
        late[0].weights["norm.weight"], late[1].grads["norm.weight"] * 0 + 1
    )  # the initial ones


@pytest.mark.process
@pytest.mark.parametrize(
    "resumed_layout", [{"tp": 2, "micro_batches": 4}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}]
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(cache, tmp_path, resumed_layout):
    layout = {"dp": 2, "zero": 1, "offload": DELAYED}
    _, workers = finish(job(cache, steps=8, **layout), tmp_path / "whole")
    expected = losses(workers)
    with running(job(cache, steps=8, every=2, **layout), tmp_path / "killed") as workers:
        workers.until(0, 5)
        for pid in workers.pids:
            os.kill(pid, signal.SIGKILL)
        workers.wait()
        before = losses(workers)
    codes, workers = finish(
        job(cache, steps=8, every=2, offload=DELAYED, **resumed_layout),
        tmp_path / "killed",
        epoch=1,
    )
    after = losses(workers)
    assert codes == [Exit.DONE] * 2 and min(after) <= 6 and max(after) == 8
    for step, loss in {**before, **after}.items():
        assert loss == pytest.approx(expected[step], rel=1e-6)


@pytest.mark.process
def test_a_narrow_run_goes_on_under_another_stage_of_zero(cache, tmp_path):
    """The weights that lack an update are as narrow under every stage, and both go on from the
    same."""
    narrow = {"dp": 2, "precision": "bf16", "offload": DELAYED}
    run_losses = []
    for first in (3, 1):
        finish(job(cache, steps=2, zero=first, **narrow), tmp_path / f"{first}")
        codes, workers = finish(
            job(cache, steps=4, zero=3, **narrow), tmp_path / f"{first}", epoch=1
        )
        assert codes == [Exit.DONE] * 2
        run_losses.append(losses(workers))
    stayed, moved = run_losses
    assert set(stayed) == {3, 4} and moved == pytest.approx(stayed, rel=1e-4)


@pytest.mark.process
@pytest.mark.parametrize("first", [DELAYED, None])
def test_a_run_may_begin_and_end_to_delay_at_a_checkpoint(cache, tmp_path, first):
    then = None if first else DELAYED
    finish(job(cache, steps=3, dp=2, zero=1, offload=first), tmp_path)
    codes, workers = finish(job(cache, steps=5, dp=2, zero=1, offload=then), tmp_path, epoch=1)
    assert codes == [Exit.DONE] * 2 and set(losses(workers)) == {4, 5}


def host_bytes(rank: int) -> tuple[int, int]:
    peak_bytes = []
    for delayed in (False, True):
        engine = engine_of(plan_of("zero1", Offload(optimizer="host", delayed=delayed)), rank)
        peak = dict[str, int]()
        with StepMemory.of_engine(engine).measure(peak):
            pass
        gradients = sum(bucket.host_grad.nbytes for bucket in engine.buckets.buckets)
        peak_bytes.append(peak["host"] - gradients * (2 if delayed else 1))
    return peak_bytes[0], peak_bytes[1]


@pytest.mark.process
def test_one_more_gradient_is_kept_on_the_host():
    for plain, delayed in run_ranks(host_bytes, 2):
        assert plain == delayed > 0


def test_the_plan_says_what_it_is_and_counts_its_gradient():
    overrides = ["cluster=h100x8", "parallel=dp8_zero1", "model=llama3_8b", "train.offload=host"]
    plain, late = (
        build_plan(load([*overrides, f"train.offload_delayed={on}"])) for on in ("false", "true")
    )
    assert any("lack the update before it" in line for line in late.warnings)
    assert not any("lack the update" in line for line in plain.warnings)
    shards = 8
    parameters = plain.memory.params / 2
    assert late.memory.host - plain.memory.host == pytest.approx(parameters * 4 / shards, rel=1e-6)
    assert late.time.step_s < plain.time.step_s and late.hash != plain.hash


@pytest.mark.parametrize("placement", ["none", "disk"])
def test_only_updates_of_the_host_are_delayed(placement):
    with pytest.raises(OrchError, match=r"train\.offload=host") as error:
        build_plan(
            load(
                [
                    "cluster=h100x8",
                    "parallel=dp8",
                    f"train.offload={placement}",
                    "train.offload_delayed=true",
                ]
            )
        )
    assert error.value.exit == Exit.CONFIG and "\n" not in error.value.message
