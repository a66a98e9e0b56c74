"""Multi-token prediction: which targets count, what its term reports, what checkpoints hold of
it."""

from __future__ import annotations

import pytest
import torch
from msgspec import UNSET, structs

from orchestrator.plan.document import Mtp
from orchestrator.plan.trained import problems
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from trainer.comm.mesh import Mesh
from trainer.data.batch import IGNORED, from_windows, look_ahead, without_targets
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch, step_batches, token_by_token

EOD = 0
AHEAD = tiny_model(mtp=Mtp(depth=2, weight=0.4))


def test_targets_lie_in_the_same_document_and_in_the_sample():
    batch = look_ahead(from_windows(torch.tensor([[1, 2, 3, EOD, 4, 5, 6]]), eod=EOD), 2)
    # tokens 1 2 3 E 4 5: the target of E, the next document's start, never counts
    assert batch.next_tokens[0, :, 0].tolist() == [2, 3, EOD, 4, 5, 0]
    assert batch.next_targets[0, :, 0].tolist() == [3, EOD, IGNORED, IGNORED, 6, IGNORED]
    assert batch.next_tokens[0, :, 1].tolist() == [3, EOD, 4, 5, 0, 0]
    assert batch.next_targets[0, :, 1].tolist() == [
        EOD,
        IGNORED,
        IGNORED,
        IGNORED,
        IGNORED,
        IGNORED,
    ]


def test_without_documents_only_the_end_of_the_sample_and_masks_have_no_target():
    batch = look_ahead(from_windows(torch.tensor([[1, 2, 3, 4]])), 1)
    assert batch.next_targets[0, :, 0].tolist() == [3, 4, IGNORED]
    empty = look_ahead(without_targets(batch), 4)  # deeper than the sample is long
    assert set(empty.next_targets.flatten().tolist()) == {IGNORED}


@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_loop_over_tokens(packed):
    plan = make_plan(model=AHEAD)
    batch = micro_batch(plan, [0, 1, 2, 3], packed)
    ahead = look_ahead(batch, 3)
    expected = token_by_token(batch, 3)
    assert torch.equal(ahead.next_tokens, expected.next_tokens)
    assert torch.equal(ahead.next_targets, expected.next_targets)


def engine(plan):
    return Engine(plan, Mesh.alone(plan), torch.device("cpu"), recipe(plan.job.train))


def test_the_term_is_reported_beside_the_main_loss():
    losses = []
    for model in (structs.replace(AHEAD, mtp=UNSET), AHEAD):
        plan = make_plan(model=model)
        batches, valid = step_batches(plan, plan.ranks[0].coord, 0)
        model_engine = engine(plan)
        loss_sum, _ = model_engine.gradients(batches, valid)
        losses.append((model_engine.mean_loss(loss_sum, valid), model_engine.loss_terms()))
    (alone, none), (with_term, terms) = losses
    assert with_term == alone and none == {}
    # A new model predicts evenly: 0.4 x log(257) for each target, of which some lie behind the
    # sample's end or a mask.
    assert set(terms) == {"mtp"} and 0.6 < terms["mtp"] / (0.4 * alone) < 1.0


@pytest.mark.process
def test_every_rank_reports_the_term_of_one_process():
    plan = make_plan(model=AHEAD, tp=2, pp=2)
    batches, valid = step_batches(plan, plan.ranks[0].coord, 0)

    def work(rank):
        rank_engine = engine_of(plan, rank)
        rank_engine.gradients(batches, valid)
        return rank_engine.loss_terms()["mtp"]

    single_engine = engine(make_plan(model=AHEAD))
    single_engine.gradients(batches, valid)
    assert run_ranks(work, 4) == [pytest.approx(single_engine.loss_terms()["mtp"], rel=1e-5)] * 4


def test_names_go_on_where_the_layers_end():
    mtp_engine = engine(make_plan(model=AHEAD))
    names = {name for name, *_ in mtp_engine.part.parameters()}
    assert {
        "layers.4.project.weight",
        "layers.5.norm_out.weight",
        "layers.5.attn.wq.weight",
    } <= names
    assert sum(param.numel() for _, param, _ in mtp_engine.part.parameters()) == AHEAD.parameters


def test_a_sequence_without_such_a_target_is_refused():
    plan = make_plan(model=tiny_model(mtp=Mtp(depth=16)), seq_len=16)
    (problem,) = problems(plan)
    assert "model.mtp.depth=16: a sequence of 16 tokens has no target so far ahead" in problem
    assert not [*problems(make_plan(model=tiny_model(mtp=Mtp(depth=15)), seq_len=16))]
