"""Products in 8 bits: the formats, what is rounded with which scale, and every layout against one
process."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import seal
from orchestrator.plan.parity import LIMITS, Cell
from orchestrator.planner.job import make_train
from tests.beds.plans import make_plan, tiny_model
from tests.trainer import samples
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.model.fp8 import (
    BLOCK,
    BlockOp,
    Shared,
    TensorOp,
    from_blocks,
    in_blocks,
    round_to,
    to_float8,
)
from trainer.parallel import fp8
from trainer.precision import FP64
from trainer.verify import oracle, plain_fp8
from trainer.verify.compare import STEPS, run_rank
from trainer.verify.judge import judge

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", DTYPES)
def test_the_twin_rounds_to_the_nearest_number_of_the_format(name):
    """The nearest number is looked up in a list of all of them; torch's cast does the same."""
    numbers = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).double()
    numbers = numbers[numbers.isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat(
        (
            numbers,
            between * (1 + 1e-6),
            between * (1 - 1e-6),
            torch.tensor([0.0, 1e6, -1e6]).double(),
        )
    )
    nearest = numbers[(x[:, None].clamp(numbers[0], numbers[-1]) - numbers).abs().argmin(1)]
    assert torch.equal(plain_fp8.nearest(x, name), nearest)
    ties = torch.cat((x, between))
    cast = ties.clamp(numbers[0], numbers[-1]).to(DTYPES[name]).double()
    assert torch.equal(plain_fp8.nearest(ties, name), cast)


def test_fp64_is_rounded_once():
    halfway = torch.tensor(
        [1.0625], dtype=torch.float64
    )  # between 1 and 1.125, goes to the even one
    for x, rounded in (
        (halfway, 1.0),
        (halfway * (1 + 1e-12), 1.125),
        (-halfway * (1 + 1e-12), -1.125),
    ):
        assert to_float8(x, DTYPES["e4m3"]).double().item() == rounded
        assert plain_fp8.nearest(x, "e4m3").item() == rounded
    assert to_float8(
        torch.tensor([0.0, -0.0, 448.0]).double(), DTYPES["e4m3"]
    ).float().tolist() == [
        0.0,
        0.0,
        448.0,
    ]
    assert to_float8(torch.tensor([torch.nan]).double(), DTYPES["e4m3"]).isnan().all()


def test_a_tensor_of_zeros_or_of_tiny_numbers_has_a_scale():
    assert torch.equal(
        round_to(torch.zeros(3), torch.zeros(()), DTYPES["e4m3"]).codes.float(), torch.zeros(3)
    )
    x = torch.tensor([1e-12, -5e-13])
    codes, unit = round_to(x, x.abs().max(), DTYPES["e4m3"])
    assert torch.allclose(codes.float() * unit, x, rtol=2**-4)


def test_nan_stays():
    assert (
        round_to(torch.tensor([torch.nan]), torch.tensor(1.0), DTYPES["e4m3"]).codes.isnan().all()
    )


@pytest.mark.parametrize(("rows", "columns"), [(1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)])
@pytest.mark.parametrize("shape", [(200, 300), (128, 256), (3, 5)])
def test_blocks_have_a_scale_each(rows, columns, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double() * torch.logspace(
        -3, 3, shape[1]
    )
    blocks = in_blocks(x, rows, columns)
    assert blocks.unit.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    expected = plain_fp8.by_blocks(x, rows, columns)
    assert torch.allclose(
        from_blocks(blocks, rows, columns, torch.float64), expected, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("make", [TensorOp, BlockOp])
def test_linears_that_share_an_input_keep_one_copy(make):
    shared = Shared()
    x = torch.randn(2, 4, 8)
    first, second = (make(shared).saved(x) for _ in range(2))
    assert first[0].data_ptr() == second[0].data_ptr() and first[0].element_size() == 1
    x.mul_(2)
    assert make(shared).saved(x)[1].max() == 2 * first[1].max()


#: Blocks of 128 lie inside of the slices of two ranks, in two pieces of the sequence each.
WIDE = {
    "layers": 2,
    "max_seq_len": 512,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn_hidden": 256,
}
SMALL = tiny_model()
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)
CASES = {
    "one process": dict(),
    "biases, tied": dict(model=GPT),
    "micro-batches of 2": dict(micro_batch_size=2),
    "full recompute": dict(recompute="full"),
    "selective recompute": dict(recompute="selective"),
    "dp2 zero1": dict(dp=2, zero=1),
    "dp2 zero2": dict(dp=2, zero=2),
    "dp2 zero3": dict(dp=2, zero=3),
    "pp2 1f1b": dict(pp=2),
    "pp2 zb_h1": dict(pp=2, schedule="zb_h1"),
    "pp2 dualpipev": dict(pp=2, vpp=2, schedule="dualpipev", micro_batches=4),
}
TENSOR_CASES = CASES | {
    "tp2": dict(tp=2, sp=False, model=GPT),
    "tp2 sp": dict(tp=2, micro_batch_size=2),
    "tp2 sp selective recompute": dict(tp=2, recompute="selective"),
    "tp2 pp2 zb_h1": dict(tp=2, pp=2, schedule="zb_h1"),
    "cp2 zigzag": dict(cp=2, cp_method="zigzag"),
    "cp2 ulysses": dict(cp=2, cp_method="ulysses"),
    "tp2 cp2": dict(tp=2, cp=2),
}
WIDE_CASES = {
    "tp2 sp": dict(tp=2),
    "cp2 zigzag": dict(cp=2, cp_method="zigzag"),
    "tp2 cp2 ring": dict(tp=2, cp=2, cp_method="ring", recompute="full"),
}
ALL = {("fp8_tensor", name): case for name, case in TENSOR_CASES.items()}
ALL |= {
    ("fp8_block", name): case
    for name, case in CASES.items()
    if name not in ("pp2 1f1b", "dp2 zero1")
}
ALL |= {
    ("fp8_block", f"wide {name}"): {**case, "model": tiny_model(**WIDE)}
    for name, case in WIDE_CASES.items()
}


def plan_of(matmul, case):
    train = {"seq_len": 512} if case.get("model", SMALL).hidden == 256 else {}
    plan = make_plan(**({"model": SMALL} | case | train))
    return seal(structs.replace(plan, job=structs.replace(plan.job, matmul=matmul)))


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_rounds_as_one_process_does(ranks):
    tasks = {}
    for (matmul, name), case in ALL.items():
        if world(case) == ranks:
            plan = plan_of(matmul, case)
            wide = oracle.train(
                seal(structs.replace(plan, job=structs.replace(plan.job, matmul=""))), 1
            )
            expected = oracle.train(plan, STEPS)
            assert abs(wide[0].loss - expected[0].loss) > 1e-6, "rounding must change something"
            tasks[f"{matmul} {name}"] = (plan, FP64, expected)
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            assert_equal(answers, LIMITS["fp64"])


@pytest.mark.process
@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_scales_of_slices_alone_are_noticed(axis, monkeypatch):
    """A largest value that each rank takes for itself."""
    monkeypatch.setattr(fp8._Over, "__call__", lambda self, largest: largest)
    plan = plan_of("fp8_tensor", {axis: 2})
    answers = run_together(run_rank, 2, {axis: (plan, FP64, oracle.train(plan, 1))})[axis]
    assert max(worst["norm"] for worst in answers) > 1e-6


def test_what_rounds_to_8_bits_is_not_compared_in_fp32():
    plan = plan_of("fp8_tensor", {})
    (verdict,) = judge([Cell(name="one", plan=plan)])
    assert verdict.equal and set(verdict.errors) == {"fp64"}


def test_compilation_is_refused_where_it_is_asked_for_and_left_out_where_not():
    config = load(
        ["+cluster=local", "model=tiny", "train.matmul=fp8_tensor", "train.compile=true"], None
    )
    with pytest.raises(OrchError, match="8-bit products need"):
        make_train(config)
    gpus = structs.replace(config.cluster, device="cuda")
    gpu_config = structs.replace(
        config, cluster=gpus, train=structs.replace(config.train, compile=None)
    )
    assert make_train(gpu_config).compile is False
