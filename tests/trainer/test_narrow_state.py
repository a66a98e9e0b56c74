"""Optimizer state in 8 bits and in bf16: what is rounded to what, every layout against one process,
resumed runs."""

from __future__ import annotations

import pytest
import torch

from orchestrator.cost.memory.rank_memory import memory_by_pp_rank
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.time.compute import NARROW_STATE
from orchestrator.cost.workload import Workload
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.operations import Kernels
from tests.trainer.samples import GPT, engine_of
from tests.trainer.states import saved_and_resumed
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.optim.adamw import AdamW
from trainer.optim.narrow import (
    BLOCK,
    Eight,
    NarrowShard,
    codebook,
    narrow_state,
    random_bits,
    rounded,
    step_narrow,
)
from trainer.optim.rule import Update
from trainer.parallel.params import ParamInfo, even_shard, whole
from trainer.precision import FP64
from trainer.verify import plain_state
from trainer.verify.compare import LIMIT, run_rank
from trainer.verify.oracle import train

#: Slices of two ranks are whole blocks.
WIDE = dict(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn_hidden=128)
LLAMA = tiny_model(**WIDE)
TIED = tiny_model(**WIDE, **GPT, tied_embeddings=True)
UPDATE = Update(1e-3, torch.tensor(1.0), torch.tensor(0.0))


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


@pytest.mark.parametrize("signed", [True, False])
def test_the_numbers_are_those_of_the_definition(signed):
    book = codebook(signed)
    assert book.numel() == 256 and book.unique().numel() == 256
    assert book.tolist() == pytest.approx(plain_state._numbers(signed), rel=1e-12)


def test_what_is_kept_in_8_bits_is_nearest_and_stays():
    x = torch.randn(
        8 * BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).exp()
    for kind, value in (("exp_avg_sq", x), ("exp_avg", x * torch.randn(8 * BLOCK).sign())):
        stored = Eight(kind, value.numel(), torch.float64, zeros)
        assert not stored.load(0, value.numel()).any()
        stored.store(0, value, UPDATE)
        loaded = stored.load(0, value.numel())
        torch.testing.assert_close(
            loaded,
            plain_state.narrowed(
                value.view(8, -1), "8bit", kind=kind, name="", seed=0, update=1
            ).flatten(),
        )
        stored.store(0, torch.zeros_like(value), Update(1e-3, torch.tensor(1.0), torch.tensor(1.0)))
        assert torch.equal(stored.load(0, value.numel()), loaded), (
            "a skipped update changes nothing"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stochastic_rounding_keeps_the_mean(dtype):
    """1 + 0.3 / 128 lies between two numbers of bf16."""
    count = 1 << 16
    bits = random_bits(whole("x", (256, 256)), 0, count, torch.tensor(5), torch.tensor(3.0))
    assert bits.min() >= 0 and bits.max() < 1 << 16
    for sign in (1, -1):
        rounded_values = (
            rounded(torch.full((count,), sign * (1 + 0.3 / 128), dtype=dtype), bits).double() * sign
        )
        assert sorted(rounded_values.unique().tolist()) == [1.0, 1 + 1 / 128]
        assert (rounded_values.mean().item() - 1) * 128 == pytest.approx(0.3, abs=0.01)
    exact = torch.tensor([0.0, 1.0, -0.375, 1e30], dtype=dtype).bfloat16().to(dtype)
    assert torch.equal(rounded(exact, bits[:4]).to(dtype), exact)


def test_random_bits_differ_by_update_element_and_parameter():
    for shape in ((1000,), (20, 50)):
        first_bits = random_bits(whole("x", shape), 0, 1000, torch.tensor(5), torch.tensor(3.0))
        assert first_bits.unique().numel() > 900
        for salt, number in ((5, 4.0), (6, 3.0)):
            second_bits = random_bits(
                whole("x", shape), 0, 1000, torch.tensor(salt), torch.tensor(number)
            )
            assert (first_bits == second_bits).float().mean() < 0.01


def test_a_slice_has_the_bits_of_the_whole_parameter():
    shape = (4, 6, 8)
    salt = (torch.tensor(7), torch.tensor(2.0))
    every = random_bits(whole("x", shape), 0, 192, *salt).view(shape)
    for cuts in (
        (),
        (even_shard(2, 8, 1, 2),),
        (even_shard(0, 4, 1, 2, "ep"), even_shard(1, 6, 2, 3)),
    ):
        info = ParamInfo("x", shape, True, cuts)
        local = every[info.global_slices].flatten()
        assert torch.equal(random_bits(info, 5, local.numel() - 3, *salt), local[5:-3])


def test_bytes_of_an_update_are_those_that_predictions_take():
    count = 1 << 18
    rule = AdamW(make_plan().job.optim)
    for form, planned in NARROW_STATE.items():
        piece = whole("x", (512, 512)), 0, count, 0
        state = {
            kind: narrow_state(
                form,
                kind,
                [piece],
                numel=count,
                dtype=torch.float32,
                zeros=zeros,
                seed=1,
            )
            for kind in rule.kinds
        }
        with Kernels() as counted:
            step_narrow(
                rule,
                [NarrowShard(torch.zeros(count), torch.ones(count), state)],
                UPDATE,
                decay=True,
            )
        wide = 4 * 4  # what the fused update reads, as it is counted
        assert sum(counted.bytes) / count - wide == pytest.approx(planned, rel=0.05)


CASES = {
    "one process": {},
    "biases, tied": dict(model=TIED),
    "dp2 zero1": dict(dp=2, zero=1),
    "dp2 zero2, small buckets": dict(dp=2, zero=2, micro_batches=3, bucket_bytes=1 << 12),
    "dp2 zero3": dict(dp=2, zero=3),
    "tp2": dict(tp=2, model=TIED, sp=False),
    "pp2 zb_h1": dict(pp=2, schedule="zb_h1"),
    "tp2 dp2 zero1": dict(tp=2, dp=2, zero=1),
    "tp2 dp2 zero3": dict(tp=2, dp=2, zero=3),
}
KINDS = {"8bit": {}, "bf16": {}, "8bit sgd": dict(optim_kind="sgd")}


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_keeps_what_one_process_keeps(ranks):
    tasks = {}
    for state, kind in KINDS.items():
        for name, case in CASES.items():
            if world(case) == ranks and (
                not kind or name in ("one process", "dp2 zero2, small buckets")
            ):
                plan = make_plan(
                    **({"model": LLAMA, "optim_state": state.split()[0]} | kind | case)
                )
                tasks[f"{state} {name}"] = (plan, FP64, train(plan, 3))
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            assert_equal(answers, LIMIT[torch.float64])


def bytes_of(rank, plan):
    engine = engine_of(plan, rank)
    every = sum(tensor.numel() for tensor in engine.buckets.param_tensors())
    padding = (
        every - sum(param.numel() for _, param, _ in engine.part.parameters())
        if plan.parallel.zero < 3
        else 0
    )
    return sum(tensor.nbytes for tensor in engine.optimizer.tensors()), padding


@pytest.mark.process
def test_planned_bytes_are_those_that_are_kept():
    for state in ("8bit", "bf16"):
        for precision, model in (("fp32", TIED), ("bf16", LLAMA)):
            plan = make_plan(model=model, optim_state=state, precision=precision)
            recipe = recipe_of("orch", plan.job.optim)
            (account,) = memory_by_pp_rank(
                Workload(plan.model, plan.parallel, plan.job.train), plan.cluster, recipe
            )
            held, padding = bytes_of(0, plan)
            assert 0 <= held - account.optimizer <= 12 * padding


@pytest.mark.process
@pytest.mark.parametrize("state", ["8bit", "bf16"])
def test_a_run_that_another_layout_resumes_goes_on_as_one_process(state, tmp_path):
    first = make_plan(model=LLAMA, dp=4, zero=1, micro_batches=1, optim_state=state)
    second = make_plan(model=LLAMA, tp=2, dp=2, zero=3, micro_batches=2, optim_state=state)
    expected = train(first, 2)
    saved_and_resumed(tmp_path, first, second, expected, rtol=1e-9, atol=1e-11)
