"""`python -m trainer.verify`: its oracle against the naive twins, its verdicts, its ways to
fail."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest
import torch

import trainer.verify.judge as judging
from orchestrator.cli.main import main as orch
from orchestrator.plan import seal
from orchestrator.plan.document import Offload
from orchestrator.plan.exits import Exit
from orchestrator.plan.offload import buffer_size
from orchestrator.plan.parity import ALONE, HOPELESS, LIMITS, Cell, Verdict
from tests.beds.plans import make_plan, tiny_model
from tests.independent.oracle.findings import ALLOWED, rounding
from tests.independent.oracle.shapes import shapes
from tests.patience import PATIENCE_S
from tests.reference import single
from tests.trainer import samples
from trainer.engine import Engine
from trainer.verify import oracle
from trainer.verify.__main__ import main as program
from trainer.verify.compare import STEPS, scale_of
from trainer.verify.judge import judge, summary

GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)


@pytest.mark.parametrize("model", [tiny_model(), GPT], ids=["gqa", "gpt"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_oracle_equals_the_naive_twin(model, packed):
    """Two single processes that share the initial weights and nothing else: formulas by hand, and
    torch's pieces."""
    plan = make_plan(model=model, micro_batches=3, clip_grad_norm=0.5)
    twin = single.train(plan, STEPS, torch.float64, packed)
    for ours, theirs in zip(oracle.train(plan, STEPS, packed), twin, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-12) and ours.norm == pytest.approx(
            theirs.norm, rel=1e-12
        )
        for name, grad in theirs.grads.items():
            assert (ours.grads[name] - grad).abs().max() < 1e-13
            assert (ours.weights[name] - theirs.weights[name]).abs().max() < 1e-11


def test_a_quantity_that_nobody_compared_is_hopelessly_wrong():
    errors = summary(
        [{"loss": 0.0, "grad a": 1e-12, "weight a": 0.0}, {"norm": 0.0, "grad a": 1e-11}], {"a"}
    )
    assert (errors.grad, errors.worst_grad, errors.largest) == (1e-11, "a", 1e-11)
    assert summary([{"loss": 0.0, "norm": 0.0, "grad a": 0.0}], {"a"}).weight == HOPELESS
    assert (
        summary([{"loss": 0.0, "norm": 0.0, "grad a": 0.0, "weight a": 0.0}], {"a", "b"}).grad
        == HOPELESS
    )


def test_a_tensor_whose_terms_cancel_may_have_their_rounding():
    """Its error is measured by the model's largest, not by itself; nothing is measured by more."""
    widths = sum(sum(shape[-2:]) for shape in shapes(msgspec.to_builtins(tiny_model())).values())
    limit = LIMITS["fp64"]
    for tensor_scale in (0.0, 1e-16, 2e-10, 1e-6, 1e-3, 1.0):
        allowed = limit * scale_of(tensor_scale, 1.0, limit)
        assert ALLOWED * rounding(widths, torch.float64) < allowed <= limit, tensor_scale


def test_terms_of_the_loss_and_state_are_judged_too():
    ranks = [{"loss": 0.0, "norm": 0.0, "grad a": 0.0, "weight a": 0.0, "term z": 1e-3}]
    errors = summary(ranks, {"a"}, {"term z"})
    assert (errors.more, errors.worst_more, errors.largest) == (1e-3, "term z", 1e-3)
    assert summary(ranks, {"a"}, {"term z", "state bias"}).more == HOPELESS


def test_infinity_survives_json():
    verdict = Verdict(
        name="x", errors={"fp64": summary([{"loss": float("inf"), "norm": 0.0}], {"a"})}
    )
    again = msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict)
    assert again == verdict and again.word == "DIFFERENT"


@pytest.mark.process
def test_cells_of_all_kinds_in_one_go():
    cells = [
        Cell(name="refused", plan=make_plan(model=tiny_model(head_dim=7))),
        Cell(name="too many", plan=make_plan(dp=64)),
        Cell(name="one", plan=make_plan()),
        Cell(name="dp2", plan=make_plan(dp=2), packed=True),
        Cell(name="tp2", plan=make_plan(tp=2)),
    ]
    verdicts = {verdict.name: verdict for verdict in judge(cells, together=2)}
    assert {name: verdict.word for name, verdict in verdicts.items()} == {
        "refused": "refused",
        "too many": "refused",
        "one": "equal",
        "dp2": "equal",
        "tp2": "equal",
    }
    assert (
        set(verdicts["dp2"].errors) == {"fp64", "fp32"}
        and "64 ranks" in verdicts["too many"].refused
    )


@pytest.mark.process
def test_zero3_with_states_elsewhere_rounds_where_one_process_does():
    """Its shards are narrow; their gradients are summed over ranks, replicas and micro-batches in
    fp32."""
    narrow = {"zero": 3, "precision": "bf16", "micro_batches": 3}
    buffer = buffer_size(200_000, 3, 4)
    layouts = {
        "host": {"dp": 4, "zero_group": 2, "offload": Offload(optimizer="host")},
        "late": {"dp": 4, "offload": Offload(optimizer="host", delayed=True)},
        "disk": {"dp": 4, "offload": Offload(optimizer="disk", buffer_bytes=buffer)},
    }
    cells = [
        Cell(name=name, plan=make_plan(**narrow, **layout), precision="bf16")
        for name, layout in layouts.items()
    ]
    verdicts = {verdict.name: verdict for verdict in judge(cells, [], together=3)}
    assert {name: verdict.word for name, verdict in verdicts.items()} == dict.fromkeys(
        layouts, "equal"
    )
    assert all(set(verdict.errors) == {"bf16", f"bf16{ALONE}"} for verdict in verdicts.values())


@pytest.mark.process
def test_a_cell_that_breaks_costs_its_neighbour_nothing(monkeypatch):
    original = Engine.gradients

    def gradients(self, batches, tokens):
        if self.plan.parallel.tp == 2 and self.mesh.rank == 1:
            raise ZeroDivisionError("seeded")
        return original(self, batches, tokens)

    monkeypatch.setattr(Engine, "gradients", gradients)
    cells = [Cell(name="dp2", plan=make_plan(dp=2)), Cell(name="tp2", plan=make_plan(tp=2))]
    verdicts = {verdict.name: verdict for verdict in judge(cells, ["fp64"], together=2)}
    assert verdicts["dp2"].word == "equal"
    assert (
        verdicts["tp2"].word == "failed" and "ZeroDivisionError: seeded" in verdicts["tp2"].failed
    )


@pytest.mark.process
def test_a_key_bias_does_not_differ_where_the_eps_of_a_plan_is_below_its_rounding():
    """Softmax ignores a key bias, so its gradient is rounding, which AdamW would make a whole step
    of."""
    plan = make_plan(model=GPT, tp=2)
    optim = msgspec.structs.replace(plan.job.optim, eps=1e-15)
    plan = seal(msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, optim=optim)))
    (verdict,) = judge([Cell(name="tp2", plan=plan)], ["fp64"])
    assert verdict.word == "equal", verdict


@pytest.mark.process
def test_ranks_that_hang_are_a_failure(monkeypatch):
    original = Engine.gradients

    def gradients(self, batches, tokens):
        if self.mesh.rank == 1:
            import time

            time.sleep(60)
        return original(self, batches, tokens)

    monkeypatch.setattr(Engine, "gradients", gradients)
    monkeypatch.setattr(judging, "START_S", 3.0)
    monkeypatch.setattr(judging, "CELL_S", 0.0)
    (verdict,) = judge([Cell(name="dp2", plan=make_plan(dp=2))], ["fp64"])
    assert verdict.word == "failed"


@pytest.mark.process
def test_the_program_reads_lines_and_writes_lines(tmp_path, capsys):
    """Here, where torch is in memory; the test below has it as a process of its own."""
    path = tmp_path / "cells.jsonl"
    path.write_bytes(msgspec.json.encode(Cell(name="one", plan=make_plan())) + b"\n")
    assert program([str(path), "--precisions", "fp64"]) == Exit.DONE
    (line,) = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line, type=Verdict).equal
    command = [sys.executable, "-m", "trainer.verify", str(path)]
    path.write_text('{"name": "x"}\n')
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == Exit.CONFIG and "missing required field `plan`" in done.stderr


@pytest.mark.process
@pytest.mark.slow
def test_the_verb_says_equal_and_speaks_json(capsys):
    assert orch(["verify", "parallel=dp2", "--json"]) == Exit.DONE
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["verdict"] == "equal"


def test_the_verb_refuses_before_it_starts_anything(capsys):
    assert orch(["verify", "model=tiny", "parallel=tp16"]) == Exit.CONFIG
    assert "refused" in capsys.readouterr().out
    assert orch(["verify"]) == Exit.USAGE
    assert orch(["verify", "--matrix", "quick", "parallel=dp2"]) == Exit.USAGE
    assert orch(["verify", "parallel=dp2", "--out", "x.md"]) == Exit.USAGE


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.full
def test_the_quick_matrix_is_equal(tmp_path, capsys):
    page = tmp_path / "parity.md"
    code = orch(["verify", "--matrix", "quick", "--out", str(page)])
    assert code == Exit.DONE, capsys.readouterr().out
    assert "DIFFERENT" not in page.read_text() and "failed" not in page.read_text()
