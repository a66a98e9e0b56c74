"""Biases and loads that routers keep: how a step moves them, alike on every layout. Biases are
weights of an export.

That they choose, and equal one process's after steps on every layout of the matrix, is shown by its
"deepseek" cells.
"""

from __future__ import annotations

import json

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from orchestrator.plan import Exit
from orchestrator.plan.document import Moe
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import NoGroups, engine_of, mixture_on_meta
from tests.trainer.states import opened
from tests.trainer.together import run_together, told, world
from trainer.comm.collectives import CommCounter
from trainer.export import main
from trainer.model.balance import batch_balance, bias_change, load_of
from trainer.model.router import Routing
from trainer.parallel.expert.choice_states import ChoiceStates
from trainer.precision import FP64
from trainer.verify import alone
from trainer.verify.samples import step_batches

SPEED = 0.125  # exact in fp32
MOE = Moe(
    experts=5, top_k=2, ffn_hidden=12, first_dense_layers=1, score="sigmoid", bias_update=SPEED
)
MOE = structs.replace(MOE, balance_loss=0.1, balance_over="batch")  # routers keep the load, too
MODEL = tiny_model(layers=4, moe=MOE)
EIGHT = tiny_model(layers=4, moe=Moe(experts=8, top_k=2, ffn_hidden=8, bias_update=SPEED))
CASES = {
    "dp3, unequal, padded": dict(dp=3, zero=2, replica_micro_batches=[2, 1, 1]),
    "pp3 split backward, full": dict(
        pp=3, schedule="zb_h1", stage_layers=[2, 1, 1], recompute="full"
    ),
    "tp3 without sp": dict(
        tp=3, sp=False, model=tiny_model(layers=2, moe=MOE, heads=3, kv_heads=3)
    ),
}


def test_the_change_is_that_of_the_paper():
    chosen = [[3, 1, 2, 2], [0, 0, 7, 1], [4, 4, 4, 4], [0, 0, 0, 0]]
    expected_changes = []
    for layer in chosen:
        mean = sum(layer) / len(layer)
        expected_changes.append(
            [0.0 if often == mean else 0.5 if often < mean else -0.5 for often in layer]
        )
    changes = bias_change(torch.tensor(chosen), 0.5)
    assert changes.dtype == torch.float32 and changes.tolist() == expected_changes


def test_the_load_of_the_batch_is_balanced_by_what_the_step_before_chose():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(7, 4, generator=generator, dtype=torch.float64)
    chosen = torch.tensor([[3, 1, 2, 2], [0, 0, 7, 1]])
    load = load_of(chosen)
    assert load.dtype == torch.float32 and load.tolist() == [
        [1.5, 0.5, 1.0, 1.0],
        [0.0, 0.0, 3.5, 0.5],
    ]
    expected = sum(
        float(load[0, e]) * float(scores[token, e]) for token in range(7) for e in range(4)
    )
    balance = batch_balance(Routing(chosen, scores, scores, scores), load[0])
    assert float(balance) == pytest.approx(expected, rel=1e-12)
    even = scores / scores.sum(-1, keepdim=True)
    assert float(batch_balance(Routing(chosen, even, even, even), torch.ones(4))) == pytest.approx(
        7
    ), "1 a token"


def biases(rank, plan):
    """The biases and loads of every layer on this rank, after each of three steps of which the
    second is skipped."""
    engine = engine_of(plan, rank, FP64)
    states_by_step = []
    for step in range(3):
        _, norm = engine.gradients(
            *step_batches(plan, engine.mesh.coord, step * plan.parallel.global_batch_samples)
        )
        engine.update(norm * (float("inf") if step == 1 else 1.0), 1e-3)
        states_by_step.append({info.name: state.tolist() for info, state in engine.part.states()})
    return states_by_step


@pytest.mark.process
def test_every_layout_moves_them_as_one_process_does_and_a_skipped_step_does_not():
    plans = {name: make_plan(**({"model": MODEL} | case)) for name, case in CASES.items()}
    assert {world(case) for case in CASES.values()} == {3}
    for name, answers in run_together(
        biases, 3, {name: (plan,) for name, plan in plans.items()}
    ).items():
        with told(name):
            alone_in_one = alone.one_process(plans[name])
            first, skipped, third = biases(0, alone_in_one)
            assert first == skipped != third
            for answer in answers:
                for expected_states, rank_states in zip(
                    (first, skipped, third), answer, strict=True
                ):
                    assert rank_states == {layer: expected_states[layer] for layer in rank_states}
            assert {layer for answer in answers for layer in answer[0]} == set(first)


def test_a_bias_that_does_not_move_stays_a_part_of_the_model():
    still = tiny_model(layers=2, moe=Moe(experts=4, top_k=1, ffn_hidden=8, bias_update=0.0))
    assert [set(map(tuple, step.values())) for step in biases(0, make_plan(model=still))] == [
        {(0.0,) * 4}
    ] * 3
    without = engine_of(make_plan(model=tiny_model(moe=Moe(experts=4, top_k=1, ffn_hidden=8))), 0)
    assert not list(without.part.states())


def test_moving_them_reads_nothing_from_the_device():
    stage, terms, enter = mixture_on_meta(EIGHT)
    balance = ChoiceStates(terms)
    balance.watch(stage)
    balance.start()
    enter()
    balance.apply(torch.ones((), dtype=torch.bool, device="meta"), NoGroups(), False, CommCounter())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_has_them_in_fp32(tmp_path, capsys, dtype):
    plan = make_plan(model=MODEL)
    engine = engine_of(plan, 0)
    states = {
        info.name: state.copy_(torch.arange(5) / 1000) for info, state in engine.part.states()
    }
    opened(tmp_path / "run", 0, 0, plan).save(
        list(engine.state_pieces(to_write=True)), 1, 2, engine.scalars()
    )
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", dtype]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    tensors = load_file(report["file"])
    biases = {name: state for name, state in states.items() if name.endswith("bias")}
    assert len(biases) == 3 and report["parameters"] == plan.model.parameters
    assert not any(name.endswith("load") for name in tensors), "what only training needs"
    for name, state in biases.items():
        assert tensors[name].dtype == torch.float32 and torch.equal(tensors[name], state)
