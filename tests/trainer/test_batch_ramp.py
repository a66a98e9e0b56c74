"""Batch-size ramp: the size of every step is a function of the samples consumed, and each step is
exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.plan.document import BatchRamp
from orchestrator.plan.learning_rate import learning_rate
from tests.beds.plans import make_plan
from trainer.comm.mesh import Mesh
from trainer.data.order import micro_batches_at
from trainer.engine import Engine
from trainer.errors import LayoutError, check_supported
from trainer.precision import FP64
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch, step_batches


def sizes(plan, steps: int) -> list[int]:
    par = plan.parallel
    consumed = 0
    batch_sizes = []
    for _ in range(steps):
        many = micro_batches_at(par, plan.job.train.batch_ramp, consumed)
        batch_sizes.append(many * par.micro_batch_size * par.dp)
        consumed += batch_sizes[-1]
    return batch_sizes


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 8), st.data())
@settings(deadline=None)
def test_steps_grow_to_the_full_batch_in_whole_micro_batches(dp, size, many, data):
    full = dp * size * many
    unit = dp * size
    start = data.draw(st.integers(unit, full))
    over = data.draw(st.integers(1, 20 * full))
    plan = make_plan(
        dp=dp,
        micro_batch_size=size,
        micro_batches=many,
        batch_ramp=BatchRamp(start_samples=start, over_samples=over),
    )
    check_supported(plan)
    batch_sizes = sizes(plan, 4 * over // unit + 2)
    assert batch_sizes[0] == start // unit * unit or start == full
    assert batch_sizes == sorted(batch_sizes) and batch_sizes[-1] == full
    assert all(number % unit == 0 and unit <= number <= full for number in batch_sizes)
    for index in range(len(batch_sizes)):
        linear = start + (full - start) * sum(batch_sizes[:index]) / over
        assert sum(batch_sizes[:index]) >= over or linear - unit < batch_sizes[index] <= linear


def test_without_a_ramp_every_step_is_full():
    assert sizes(make_plan(dp=2, micro_batches=3), 3) == [6, 6, 6]


def run(rank: int, plan, steps: int) -> list[dict]:
    mesh = Mesh.from_plan(plan, rank) if plan.parallel.world_size > 1 else Mesh.alone(plan)
    engine = Engine(plan, mesh, torch.device("cpu"), FP64)
    par = plan.parallel
    consumed = 0
    record = []
    for step in range(1, steps + 1):
        batches, valid = step_batches(plan, mesh.coord, consumed)
        size = len(batches) * par.micro_batch_size * par.dp
        _, norm = engine.gradients(batches, valid)
        engine.update(norm, learning_rate(step, plan.job.optim, steps))
        engine.buckets.wait_params()
        weights = {
            info.name: info.valid(weight).clone() for info, weight in engine.buckets.full_params()
        }
        record.append({"norm": float(norm), "size": size, "weights": weights})
        consumed += size
    return record


RAMP = BatchRamp(start_samples=2, over_samples=10)


@pytest.mark.process
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 2},
        {"pp": 2, "micro_batches": 6},
        {"pp": 2, "schedule": "zb_h2", "micro_batches": 6},
        {"pp": 2, "vpp": 2, "schedule": "zbv", "micro_batches": 6},
    ],
    ids=str,
)
def test_every_size_is_one_process(layout):
    """Steps of 2, 3 (or 2), 4 and 6 samples: micro-batches come and go, the pipeline's program with
    them."""
    plan = make_plan(batch_ramp=RAMP, **({"micro_batches": 3} | layout))
    results = run_ranks(run, 2, plan, 5)
    sizes_run = [entry["size"] for entry in results[0]]
    assert sizes_run[0] == 2 and sizes_run[-1] == 6 and len(set(sizes_run)) >= 3

    # the same samples a step on one process, one fixed plan a step
    alone = Engine(make_plan(micro_batches=6), Mesh.alone(plan), torch.device("cpu"), FP64)
    consumed = 0
    for step, size in enumerate(sizes_run, start=1):
        batch = micro_batch(plan, list(range(consumed, consumed + size)))
        _, norm = alone.gradients([batch], batch.valid_tokens)
        alone.update(norm, learning_rate(step, plan.job.optim, 5))
        consumed += size
        weights = {info.name: weight for info, weight in alone.buckets.full_params()}
        for result in results:
            assert result[step - 1]["norm"] == pytest.approx(float(norm), rel=1e-10)
            for name, weight in result[step - 1]["weights"].items():
                assert (weight - weights[name]).abs().max() <= 1e-10 * weights[name].abs().max(), (
                    name
                )


@pytest.mark.parametrize("start", [1, 7])
def test_a_ramp_that_does_not_fit_is_refused(start):
    with pytest.raises(LayoutError, match=r"legal: from 2 .* to the full batch of 6"):
        check_supported(
            make_plan(
                dp=2, micro_batches=3, batch_ramp=BatchRamp(start_samples=start, over_samples=9)
            )
        )


def test_schedules_of_one_size_refuse_a_ramp():
    with pytest.raises(LayoutError, match="schedule dualpipe fixes"):
        check_supported(make_plan(pp=2, schedule="dualpipe", micro_batches=4, batch_ramp=RAMP))


def test_a_ramp_in_tokens_on_the_command_line_is_one_in_samples_in_the_plan():
    from orchestrator.config.compose import load
    from tests.planner.configs import build_plan

    overrides = [
        "train.batch_ramp={start_tokens: 2048, over_tokens: 40960}",
        "train.seq_len=256",
        "parallel=tp4_dp2",
    ]
    plan = build_plan(
        load([*overrides, "train.global_batch_samples=32", "parallel.micro_batch_size=2"])
    )
    assert plan.job.train.batch_ramp == BatchRamp(start_samples=8, over_samples=160)
    check_supported(plan)
    assert sizes(plan, 6) == [8, 8, 8, 8, 12, 12], "whole micro-batches of 2 samples on 2 replicas"
    assert sizes(plan, 20)[-1] == 32
