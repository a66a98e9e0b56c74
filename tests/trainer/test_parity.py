"""The key proof: every layout computes what one process computes.

Loss, the gradient of every parameter, the norm before clipping, and the weights after each of two
optimizer steps equal those of tests/reference/single.py, which shares no code with the trainer but
the initial weights. In float64 (<= 1e-10, where a real bug cannot hide) and fp32 (<= 2e-5);
trainer/verify/compare.py says relative to what.
"""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch

from orchestrator.plan import Plan
from orchestrator.plan.document import Model
from tests.beds.plans import make_plan
from tests.reference import single
from tests.trainer import samples
from tests.trainer.pairs import launches
from tests.trainer.parity_cases import GQA, IN_FP32, TECHNIQUES
from tests.trainer.together import run_together, told, world
from trainer.precision import FP64, recipe
from trainer.verify.compare import LIMIT, STEPS, run_rank, with_eps
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch


@functools.cache
def reference(
    model: bytes, samples: int, dtype: torch.dtype, packed: bool = False
) -> list[single.Outcome]:
    """One process on the same samples; the layout does not matter to it, so cases share it."""
    shapes = msgspec.json.decode(model, type=Model)
    return single.train(
        parity_plan(dtype, model=shapes, micro_batches=samples), STEPS, dtype, packed
    )


def expected_of(plan: Plan, dtype: torch.dtype, packed: bool = False) -> list[single.Outcome]:
    return reference(
        msgspec.json.encode(plan.model), plan.parallel.global_batch_samples, dtype, packed
    )


def parity_plan(dtype: torch.dtype, **options: object) -> Plan:
    return with_eps(make_plan(**options), "fp64" if dtype == torch.float64 else "fp32")


def arguments(case: dict, dtype: torch.dtype) -> tuple:
    """What `run_rank` takes after the rank."""
    options = {"model": GQA, **case}
    packed = options.pop("packed", False)
    plan = parity_plan(dtype, **options)
    use = FP64 if dtype == torch.float64 else recipe(plan.job.train)
    return plan, use, expected_of(plan, dtype, packed), packed


CASES = {
    (technique, name): case
    for technique, technique_cases in TECHNIQUES.items()
    for name, case in technique_cases.items()
}
CASES_IN_FP32 = {
    (technique, name): case
    for (technique, name), case in CASES.items()
    if technique == "layouts" or name in IN_FP32
}
CHOSEN_IN_FP32 = [key for key in CASES_IN_FP32 if key[-1] in IN_FP32]


@pytest.mark.process
@pytest.mark.parametrize("cases", launches(CASES))
def test_layouts_equal_one_process(cases):
    assert_equal_to_one_process(cases, torch.float64)


@pytest.mark.process
@pytest.mark.parametrize("cases", launches(CASES_IN_FP32, CHOSEN_IN_FP32))
def test_layouts_equal_one_process_in_fp32(cases):
    assert_equal_to_one_process(cases, torch.float32)


def assert_equal_to_one_process(cases: dict[str, dict], dtype: torch.dtype) -> None:
    (ranks,) = {world(case) for case in cases.values()}
    tasks = {name: arguments(case, dtype) for name, case in cases.items()}
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            quantities = set().union(*answers)
            expected = tasks[case][2]
            assert len(expected) == STEPS
            for name in expected[0].grads:
                assert {f"grad {name}", f"weight {name}"} <= quantities, (
                    "some rank must hold every parameter"
                )
            assert {"loss", "norm"} <= quantities
            bad = [
                (error, rank, quantity)
                for rank, worst in enumerate(answers)
                for quantity, error in worst.items()
            ]
            bad = [entry for entry in bad if not entry[0] <= LIMIT[dtype]]
            assert bad == [], "\n".join(
                f"{e:.2e} rank {r} {w}" for e, r, w in sorted(bad, reverse=True)[:6]
            )


@pytest.mark.process
def test_bf16_runs_in_bf16_and_stays_near_one_process_in_float32():
    """No proof (rounding hides bugs), but every kernel and collective of tensor parallelism must
    take the dtype."""
    plan = make_plan(tp=2, precision="bf16", model=samples.small(**samples.LLAMA, **samples.GQA))

    def work(rank):
        engine = samples.engine_of(plan, rank)
        batches = [micro_batch(plan, [index]) for index in range(2)]
        valid = sum(batch.valid_tokens for batch in batches)
        loss, norm = engine.gradients(batches, valid)
        assert {param.dtype for _, param, _ in engine.part.parameters()} == {torch.bfloat16}
        return [loss.item() / valid, norm.item()]

    first, second = run_ranks(work, 2)
    expected = expected_of(plan, torch.float32)[0]
    assert first == second and first[0] == pytest.approx(expected.loss, rel=5e-3)
    assert first[1] == pytest.approx(expected.norm, rel=5e-2)


def test_the_comparison_notices_a_gradient_that_is_wrong_by_a_millionth():
    """The proof itself is tested: one element of one gradient moved by 1e-6 of the largest is
    seen."""
    plan, use, expected, _ = arguments({"micro_batches": 2}, torch.float64)
    name = "layers.2.mlp.down.weight"
    grads = dict(expected[0].grads)
    grads[name] = grads[name].clone(memory_format=torch.contiguous_format)
    grads[name].view(-1)[7] += 1e-6 * grads[name].abs().max()
    wrong = single.Outcome(expected[0].loss, expected[0].norm, grads, expected[0].weights)
    worst = run_rank(0, plan, use, [wrong])
    assert [quantity for quantity, error in worst.items() if error > LIMIT[torch.float64]] == [
        f"grad {name}"
    ]
