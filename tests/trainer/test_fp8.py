"""Products in 8 bits: the formats, what is rounded with which scale, and every layout against one
process."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import seal
from orchestrator.plan.model import Mla, Moe, Mtp
from orchestrator.plan.parity import LIMITS, Cell
from orchestrator.planner.job import make_train
from tests.beds.plans import make_plan, tiny_model
from tests.trainer import samples
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.model.fp8.linears import BLOCK, BlockOp, Shared, TensorOp
from trainer.model.fp8.rounding import Grid, round_to, to_float8
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


def test_the_last_digits_of_fp64_decide_no_tie():
    """Layouts sum in other orders, so they do not share these digits."""
    halfway = torch.tensor([1.0625], dtype=torch.float64)  # between 1, the even one, and 1.125
    for x, rounded in (
        (halfway * (1 + 1e-12), 1.0),
        (halfway * (1 - 1e-12), 1.0),
        (halfway * (1 + 1e-6), 1.125),
        (-halfway * (1 + 1e-6), -1.125),
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
    grid = Grid(rows, columns)
    blocks = grid.round(x)
    assert blocks.unit.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    expected = plain_fp8.by_blocks(x, rows, columns)
    assert torch.allclose(grid.values(blocks, torch.float64), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [TensorOp, BlockOp])
def test_linears_that_share_an_input_keep_one_copy(make):
    shared = Shared()
    x = torch.randn(2, 4, 8)
    first, second = (make(shared).saved(x) for _ in range(2))
    assert first[0].data_ptr() == second[0].data_ptr() and first[0].element_size() == 1
    x.mul_(2)
    assert make(shared).saved(x)[1].max() == 2 * first[1].max()


#: Blocks of 128 lie inside of the slices of two ranks, in two pieces of the sequence each.
WIDE = tiny_model(
    layers=2, max_seq_len=512, hidden=256, heads=4, kv_heads=4, head_dim=64, ffn_hidden=256
)
SMALL = tiny_model()
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)
LATENTS = Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
LATENT = tiny_model(kv_heads=4, mla=LATENTS)
MIXTURE = tiny_model(moe=Moe(experts=4, top_k=2, ffn_hidden=12, balance_loss=0.1))
PLAIN_MIXTURE = tiny_model(mlp="plain", moe=Moe(experts=5, top_k=2, ffn_hidden=12))
#: A dense layer, experts with a shared one, latent attention, two further predictions.
DEEPSEEK = tiny_model(
    kv_heads=4,
    mla=LATENTS,
    moe=Moe(experts=4, top_k=2, ffn_hidden=12, shared_ffn_hidden=24, first_dense_layers=1),
    mtp=Mtp(depth=2, weight=0.4),
)
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
    "tp2": dict(tp=2, sp=False, model=GPT),
    "tp2 sp": dict(tp=2, micro_batch_size=2),
    "tp2 sp selective recompute": dict(tp=2, recompute="selective"),
    "tp2 pp2 zb_h1": dict(tp=2, pp=2, schedule="zb_h1"),
    "tp4, shared key-value heads": dict(tp=4),
    "tp4 without sp, shared key-value heads": dict(tp=4, sp=False, recompute="full"),
    "cp2 zigzag": dict(cp=2, cp_method="zigzag", micro_batch_size=2),
    "cp2 ulysses": dict(cp=2, cp_method="ulysses"),
    "tp2 cp2": dict(tp=2, cp=2),
    "latents": dict(model=LATENT),
    "latents, tp2 cp2 selective": dict(model=LATENT, tp=2, cp=2, recompute="selective"),
    "latents, tp2 without sp": dict(model=LATENT, tp=2, sp=False),
    "plain experts": dict(model=PLAIN_MIXTURE),
    "experts, tp2": dict(model=MIXTURE, tp=2),
    "experts, tp2 without sp": dict(model=MIXTURE, tp=2, sp=False),
    "experts, ep2 tp2 full recompute": dict(model=MIXTURE, ep=2, tp=2, recompute="full"),
    "experts, ep2 cp2": dict(model=MIXTURE, ep=2, cp=2),
    "experts, tp2 etp1": dict(model=MIXTURE, tp=2, etp=1),
    "deepseek": dict(model=DEEPSEEK),
    "deepseek, ep2 pp2 dualpipe": dict(
        model=DEEPSEEK, ep=2, pp=2, schedule="dualpipe", micro_batches=4
    ),
    "deepseek, ep2 dp2 zero2": dict(model=DEEPSEEK, ep=2, dp=2, zero=2),
}
#: What differs for blocks: with the rest of the layouts they have no more to do.
IN_BLOCKS = CASES.keys() - {"pp2 1f1b", "dp2 zero1", "pp2 dualpipev", "plain experts"}
WIDE_CASES = {
    "tp2 sp": dict(tp=2, model=WIDE),
    "cp2 zigzag": dict(cp=2, cp_method="zigzag", model=WIDE),
    "tp2 cp2 ring": dict(tp=2, cp=2, cp_method="ring", recompute="full", model=WIDE),
}
#: What differs for scales of earlier steps: what is counted, when, and over which ranks.
DELAYED = {
    "one process",
    "micro-batches of 2",
    "full recompute",
    "dp2 zero3",
    "pp2 zb_h1",
    "pp2 dualpipev",
    "tp2 sp selective recompute",
    "tp4 without sp, shared key-value heads",
    "tp2 cp2",
    "deepseek, ep2 pp2 dualpipe",
}
ALL = {("fp8_tensor", name): case for name, case in CASES.items()}
ALL |= {("fp8_delayed", name): CASES[name] for name in DELAYED}
ALL |= {("fp8_block", name): CASES[name] for name in IN_BLOCKS}


def plan_of(matmul, case):
    train = {"seq_len": 512} if case.get("model") is WIDE else {}
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
@pytest.mark.parametrize(
    ("matmul", "name"),
    [
        ("fp8_tensor", "tp2 sp"),
        ("fp8_tensor", "cp2 zigzag"),
        ("fp8_tensor", "experts, tp2"),
        ("fp8_block", "tp2 sp"),
        ("fp8_block", "cp2 zigzag"),
    ],
)
def test_scales_of_slices_alone_are_noticed(matmul, name, monkeypatch):
    """A largest value that each rank takes for itself."""
    monkeypatch.setattr(fp8._Over, "__call__", lambda self, largest: largest)
    plan = plan_of(matmul, CASES[name])
    answers = run_together(run_rank, 2, {name: (plan, FP64, oracle.train(plan, 1))})[name]
    assert max(worst["norm"] for worst in answers) > 1e-6


def _no_message(self, largest):
    raise AssertionError("slices of whole blocks need no other rank's numbers")


@pytest.mark.process
def test_slices_of_whole_blocks_send_no_scales(monkeypatch):
    monkeypatch.setattr(fp8._Over, "__call__", _no_message)
    for ranks in (2, 4):
        plans = {
            name: plan_of("fp8_block", case)
            for name, case in WIDE_CASES.items()
            if world(case) == ranks
        }
        tasks = {name: (plan, FP64, oracle.train(plan, STEPS)) for name, plan in plans.items()}
        for case, answers in run_together(run_rank, ranks, tasks).items():
            with told(case):
                assert_equal(answers, LIMITS["fp64"])


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


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_kernel_of_fp8_units_multiplies_what_the_emulation_does(precision):
    """torch has the kernel on CPUs, too."""
    generator = torch.Generator().manual_seed(1)
    x, weight, grad = (
        torch.randn(shape, generator=generator).to(precision)
        for shape in ((2, 32, 48), (64, 48), (2, 32, 64))
    )
    products = []
    for fp8_unit in (False, True):
        op = TensorOp(Shared(), fp8_unit=fp8_unit)
        products.append(
            (
                op.forward(x, weight, None),
                op.input_grad(grad, weight),
                op.weight_grad(grad, op.saved(x)),
            )
        )
    for emulated, multiplied in zip(*products, strict=True):
        assert multiplied.dtype == precision and multiplied.shape == emulated.shape
        torch.testing.assert_close(multiplied, emulated, rtol=1e-2, atol=1e-6)
    odd = TensorOp(Shared(), fp8_unit=True).forward(x[..., :40], weight[:, :40], None)
    assert odd.shape == (2, 32, 64), "sizes that the kernel does not take are emulated"
