"""The measured errors of products in 8 bits, against a naive computation of the same."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.model import Mla, Moe, Mtp
from orchestrator.plan.rounding.measurement import LinearErrors, Measurement, Request
from orchestrator.plan.rounding.proposal import propose
from orchestrator.plan.rounding.wide import linears
from tests.beds.plans import make_plan, tiny_model
from trainer.errors import CheckpointError, DataError
from trainer.model.stage import Stage
from trainer.rounding import measure as rounding
from trainer.rounding.model import in_one_process, make_stage, read_batches
from trainer.verify import plain_fp8

SMALL = tiny_model()
DEEPSEEK = tiny_model(
    kv_heads=4,
    mla=Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8),
    moe=Moe(experts=4, top_k=2, ffn_hidden=12, shared_ffn_hidden=24, first_dense_layers=1),
    mtp=Mtp(depth=1, weight=0.4),
)


@pytest.fixture
def plan_of(tmp_path):
    (tmp_path / "text.py").write_text("".join(f"line {number * 7919}\n" for number in range(400)))

    def make(matmul: str = "fp8_tensor", **options) -> Plan:
        paths = {"data_paths": [str(tmp_path / "text.py")], "cache_dir": str(tmp_path / "tokens")}
        plan = make_plan(**({"model": SMALL, "micro_batch_size": 2} | paths | options))
        return structs.replace(plan, job=structs.replace(plan.job, matmul=matmul))

    return make


def measured(plan: Plan, checkpoints: str = "") -> Measurement:
    request = Request(plan=plan, checkpoints=checkpoints, batches=2)
    *progress, last = rounding.measure(request)
    assert [answer.done for answer in progress] == list(range(last.total))
    assert last.done == last.total and last.measurement is not None
    return last.measurement


def off(narrow: list[torch.Tensor], wide: list[torch.Tensor]) -> float:
    difference = torch.cat([(n - w).flatten() for n, w in zip(narrow, wide, strict=True)])
    return float(difference.norm() / torch.cat([w.flatten() for w in wide]).norm())


@pytest.mark.parametrize("matmul", ["fp8_tensor", "fp8_block", "fp8_delayed"])
def test_the_errors_are_those_of_the_formula(plan_of, matmul):
    plan = plan_of(matmul)
    result = measured(plan)
    assert [(linear.layer, linear.name) for linear in result.linears] == list(linears(SMALL))
    alone = in_one_process(plan, 2)
    stage = make_stage(alone, None)
    batches = read_batches(alone, None)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    linear = stage.blocks[1].mlp.down
    linear.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    for batch in batches:
        loss = rounding.cross_entropy_sum(stage(None, batch), batch.targets) / result.tokens
        seen[-1][1].retain_grad()
        loss.backward()
    twin = plain_fp8.Blocks() if matmul == "fp8_block" else plain_fp8.Tensors()
    weight = linear.weight.detach()
    products: dict[str, tuple[list, list]] = {
        name: ([], []) for name in ("forward", "input_grad", "weight_grad")
    }
    for x, out in seen:
        rows = x.detach().flatten(0, -2)
        grad = out.grad.flatten(0, -2)
        for name, narrow, wide in (
            ("forward", twin.input(rows) @ twin.weight(weight).T, rows @ weight.T),
            ("input_grad", twin.grad(grad) @ twin.weight(weight), grad @ weight),
            ("weight_grad", twin.kept_grad(grad).T @ twin.kept_input(rows), grad.T @ rows),
        ):
            products[name][0].append(narrow)
            products[name][1].append(wide)
    (errors,) = (e for e in result.linears if (e.layer, e.name) == (1, "mlp.down"))
    for name, (narrow, wide) in products.items():
        assert getattr(errors, name) == pytest.approx(off(narrow, wide), rel=1e-6), name
        assert 0.01 < getattr(errors, name) < 0.1


def twin_loss(plan: Plan, tokens: int) -> float:
    """The loss of one process in which `plain_fp8` rounds all linears."""
    alone = in_one_process(plan, 2)
    stage: Stage = make_stage(alone, None)
    plain_fp8.use(stage, plan.job.matmul, 2)
    stage.terms = None
    batches = read_batches(alone, None)
    with torch.no_grad():
        return sum(
            float(rounding.cross_entropy_sum(stage(None, batch), batch.targets)) / tokens
            for batch in batches
        )


@pytest.mark.parametrize("matmul", ["fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("model", [SMALL, structs.replace(DEEPSEEK, mtp=None)])
def test_the_loss_in_8_bits_is_that_of_the_twin(plan_of, model, matmul):
    plan = plan_of(matmul, model=model)
    result = measured(plan)
    assert result.narrow_loss == pytest.approx(twin_loss(plan, result.tokens), rel=1e-9)
    assert result.narrow_loss != result.wide_loss and result.dtype == "float64"
    if model.moe:
        assert {"mlp.experts.down", "mlp.shared.up", "attn.wkv"} <= result.names.keys()
        assert all(0 < linear.largest < 0.5 for linear in result.linears)


def test_a_model_that_predicts_further_tokens_is_measured_with_them(plan_of):
    result = measured(plan_of(model=DEEPSEEK))
    assert [(linear.layer, linear.name) for linear in result.linears] == list(linears(DEEPSEEK))
    (project,) = (linear for linear in result.linears if linear.name == "project")
    assert project.layer == 4 and project.loss != 0


def test_what_is_gone_is_named(plan_of, tmp_path):
    plan = plan_of()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        measured(plan, str(tmp_path / "none"))
    (tmp_path / "text.py").unlink()
    with pytest.raises(DataError, match="does not exist"):
        measured(plan)


def linear_of(layer: int, name: str, error: float = 0.04, loss: float = 1e-4) -> LinearErrors:
    return LinearErrors(
        layer=layer, name=name, forward=error, input_grad=0.05, weight_grad=0.05, loss=loss
    )


ALL = [linear_of(layer, name) for layer in range(3) for name in ("attn.wo", "mlp.down")]


@pytest.mark.parametrize(
    ("changed", "names", "patterns"),
    [
        ({}, {}, []),
        ({(1, "attn.wo"): 0.2}, {}, ["1.attn.wo"]),
        ({(0, "attn.wo"): 0.2, (0, "mlp.down"): 0.3}, {}, ["first"]),
        ({(layer, "mlp.down"): 0.2 for layer in range(3)}, {}, ["mlp.down"]),
        ({}, {"attn.wo": 0.05, "mlp.down": 0.01}, ["attn.wo"]),
        ({}, {"attn.wo": 2e-4, "mlp.down": 1e-5}, []),  # less than noise of a loss of 2
    ],
)
def test_what_is_proposed(changed, names, patterns):
    errors = [
        structs.replace(linear, forward=changed.get((linear.layer, linear.name), linear.forward))
        for linear in ALL
    ]
    proposals = propose(errors, names, 2.0, 3)
    assert [proposal.pattern for proposal in proposals] == patterns
    assert all("(bound " in proposal.reason for proposal in proposals)


def test_a_linear_that_stands_out_in_the_loss_is_proposed():
    errors = [*ALL[:-1], linear_of(2, "mlp.down", loss=0.01)]
    (proposal,) = propose(errors, {"mlp.down": 0.0102, "attn.wo": 3e-4}, 2.0, 3)
    assert proposal.pattern == "2.mlp.down" and "+0.50%" in proposal.reason
