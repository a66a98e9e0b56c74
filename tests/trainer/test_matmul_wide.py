"""Linears that stay wide while the others compute in 8 bits: which they are, and every layout
against one process."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from orchestrator.plan import seal
from orchestrator.plan.model import Mla, Moe, Mtp
from orchestrator.plan.parity import LIMITS
from orchestrator.plan.rounding.wide import linears
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.model.experts import GroupedLinear
from trainer.model.fp8.delayed import HISTORY
from trainer.model.linear import PLAIN, Linear, run
from trainer.model.stage import Stage
from trainer.precision import FP64
from trainer.verify import oracle, plain_fp8
from trainer.verify.compare import STEPS, run_rank

LATENTS = Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
SMALL = tiny_model()
MIXTURE = tiny_model(moe=Moe(experts=4, top_k=2, ffn_hidden=12, balance_loss=0.1))
DEEPSEEK = tiny_model(
    kv_heads=4,
    mla=LATENTS,
    moe=Moe(experts=4, top_k=2, ffn_hidden=12, shared_ffn_hidden=24, first_dense_layers=1),
    mtp=Mtp(depth=2, weight=0.4),
)


def plan_of(matmul: str, wide: list[str], **layout):
    plan = make_plan(**({"model": SMALL} | layout))
    train = structs.replace(plan.job.train, matmul_wide=wide)
    return seal(structs.replace(plan, job=structs.replace(plan.job, matmul=matmul, train=train)))


def wide_linears(plan) -> set[str]:
    """The linears and matrices of experts in blocks that compute without 8 bits."""
    engine = engine_of(plan, 0)
    return {
        f"{layer}.{name}"
        for stage in engine.part.stages
        for layer, block in stage.blocks.items()
        for name, module in block.named_modules()
        if (isinstance(module, Linear) and module.op is PLAIN)
        or (isinstance(module, GroupedLinear) and not hasattr(module.op, "grad_code"))
    }


@pytest.mark.parametrize("matmul", ["fp8_tensor", "fp8_delayed", "fp8_block"])
@pytest.mark.parametrize(
    ("model", "words", "names"),
    [
        (SMALL, ["wo"], {f"{layer}.attn.wo" for layer in range(4)}),
        (SMALL, ["2.down", "attn.wq"], {"2.mlp.down", *(f"{n}.attn.wq" for n in range(4))}),
        (SMALL, ["first.up", "last.down"], {"0.mlp.up", "3.mlp.down"}),
        (
            SMALL,
            ["first"],
            {f"0.attn.{name}" for name in ("wq", "wk", "wv", "wo")}
            | {f"0.mlp.{name}" for name in ("gate", "up", "down")},
        ),
        (
            DEEPSEEK,
            ["experts.down", "project", "4.q_down"],
            {f"{layer}.mlp.experts.down" for layer in range(1, 6)}
            | {"4.project", "5.project", "4.attn.q_down"},
        ),
        (DEEPSEEK, ["0.gate", "1.shared.up"], {"0.mlp.gate", "1.mlp.shared.up"}),
    ],
)
def test_which_linears_are_wide(matmul, model, words, names):
    plan = plan_of(matmul, words, model=model)
    assert wide_linears(plan) == names
    stage = Stage(model, range(model.layers), first=True, last=True)
    plain_fp8.use(stage, matmul, 1, words)
    twins = {
        f"{layer}.{name}"
        for layer, block in stage.blocks.items()
        for name, module in block.named_modules()
        if isinstance(module, Linear) and module.run is run
    }
    assert twins == {name for name in names if ".experts." not in name}


def test_the_names_are_those_of_the_trainer():
    for model in (SMALL, MIXTURE, DEEPSEEK):
        stage = Stage(model, range(model.layers), first=True, last=True)
        names = {
            (layer, name)
            for layer, block in stage.blocks.items()
            for name, module in block.named_modules()
            if isinstance(module, Linear | GroupedLinear) and not name.endswith("router")
        }
        assert names == set(linears(model))


def test_a_wide_linear_has_no_history_of_largest_values():
    engine = engine_of(plan_of("fp8_delayed", ["wo", "last"]), 0)
    with_history = {info.name for info, _ in engine.part.states()}
    assert with_history == {
        f"layers.{layer}.{name}.{HISTORY}"
        for layer in range(3)
        for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up", "mlp.down")
    }


#: What a mixture of wide and narrow linears meets: shared inputs, sums, gathers, cut backwards.
CASES = {
    "one process": (["wo", "first"], dict()),
    "micro-batches of 2": (["wk", "2.down"], dict(micro_batch_size=2)),
    "selective recompute": (["wq", "up"], dict(recompute="selective")),
    "dp2 zero1": (["down", "last"], dict(dp=2, zero=1)),
    "dp2 zero3": (["wv", "first"], dict(dp=2, zero=3)),
    "pp2 zb_h1": (["wo", "1.up"], dict(pp=2, schedule="zb_h1")),
    "tp2": (["wo", "first"], dict(tp=2, sp=False)),
    "tp2 sp": (["wq", "down"], dict(tp=2, micro_batch_size=2)),
    "tp2 sp selective recompute": (["wo", "gate"], dict(tp=2, recompute="selective")),
    "tp4, shared key-value heads": (["wk", "1.wv"], dict(tp=4)),
    "tp2 cp2": (["wo", "last"], dict(tp=2, cp=2)),
    "experts": (["experts.up", "first"], dict(model=MIXTURE)),
    "experts, tp2": (["down"], dict(model=MIXTURE, tp=2)),
    "experts, tp2 etp1": (["gate", "up"], dict(model=MIXTURE, tp=2, etp=1)),
    "experts all wide, ep2 full recompute": (
        ["gate", "up", "down"],
        dict(model=MIXTURE, ep=2, recompute="full"),
    ),
    "deepseek": (["wkv", "shared.down", "project"], dict(model=DEEPSEEK)),
    "deepseek, ep2 dp2 zero2": (
        ["q_down", "experts.down"],
        dict(model=DEEPSEEK, ep=2, dp=2, zero=2),
    ),
}
ALL = {("fp8_delayed", name): case for name, case in CASES.items()}
ALL |= {("fp8_tensor", name): CASES[name] for name in ("tp2", "tp2 sp", "experts, tp2")}
ALL |= {("fp8_block", name): CASES[name] for name in ("tp2", "tp2 cp2", "experts", "deepseek")}


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_rounds_as_one_process_does(ranks):
    tasks = {}
    for (matmul, name), (wide, case) in ALL.items():
        if world(case) == ranks:
            plan = plan_of(matmul, wide, **case)
            expected = oracle.train(plan, STEPS)
            narrow = oracle.train(plan_of(matmul, [], **case), 1)
            assert abs(narrow[0].loss - expected[0].loss) > 1e-7, "wide linears must matter"
            tasks[f"{matmul} {name}"] = (plan, FP64, expected)
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            assert_equal(answers, LIMITS["fp64"])


def test_with_all_linears_wide_nothing_is_rounded():
    everything = ["wq", "wk", "wv", "wo", "gate", "up", "down"]
    wide = oracle.train(plan_of("fp8_tensor", everything), 1)[0]
    plain = oracle.train(plan_of("", []), 1)[0]
    assert wide.loss == plain.loss
    for name, grad in plain.grads.items():
        assert torch.equal(wide.grads[name], grad), name
