"""SGD and Muon in every kind of layout equal one process, which has them by their formulas."""

from __future__ import annotations

import pytest
import torch

from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import GPT
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.optim.muon import orthogonal
from trainer.precision import FP64
from trainer.verify.compare import LIMIT, run_rank
from trainer.verify.oracle import train

TIED = tiny_model(**GPT, tied_embeddings=True)
CASES = {
    "muon, one process": dict(optim_kind="muon"),
    "muon, dp2 zero0, gpt": dict(optim_kind="muon", dp=2, model=TIED),
    "muon, dp2 zero2": dict(optim_kind="muon", dp=2, zero=2, micro_batches=3),
    "muon, dp4 zero1 hybrid": dict(optim_kind="muon", dp=4, zero=1, zero_group=2),
    "muon, tp2 without sp": dict(optim_kind="muon", tp=2, sp=False, model=TIED),
    "muon, tp2 dp2 zero1": dict(optim_kind="muon", tp=2, dp=2, zero=1),
    "muon, tp4 one kv head": dict(optim_kind="muon", tp=4, model=tiny_model(kv_heads=1)),
    "muon, dp2 zero3": dict(optim_kind="muon", dp=2, zero=3, micro_batches=3),
    "muon, tp2 dp2 zero3": dict(optim_kind="muon", tp=2, dp=2, zero=3, model=TIED),
    "muon, cp2 dp2 zero3 hybrid": dict(optim_kind="muon", cp=2, dp=2, zero=3, zero_group=2),
    "muon, cp2 pp2": dict(optim_kind="muon", cp=2, pp=2),
    "sgd, one process": dict(optim_kind="sgd"),
    "sgd, dp2 zero3": dict(optim_kind="sgd", dp=2, zero=3),
    "sgd, tp2 dp2 zero1": dict(optim_kind="sgd", tp=2, dp=2, zero=1),
    "sgd, pp2 dp2 zero2": dict(optim_kind="sgd", pp=2, dp=2, zero=2, model=TIED),
}


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equal_to_one_process(ranks):
    tasks = {}
    for name, case in CASES.items():
        if world(case) == ranks:
            plan = make_plan(**case)
            tasks[name] = (plan, FP64, train(plan, 3))
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            assert_equal(answers, LIMIT[torch.float64])


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_the_orthogonal_part_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    direction = orthogonal(matrix)
    left_vectors, values, right_vectors = torch.linalg.svd(matrix, full_matrices=False)
    singular_values = torch.einsum(
        "ik,ij,kj->k", left_vectors, direction, right_vectors
    )  # along the matrix's own directions, not others
    assert (singular_values[values > 0.05 * values.max()] > 0.65).all() and (
        singular_values < 1.25
    ).all()
    torch.testing.assert_close(
        (left_vectors * singular_values) @ right_vectors, direction, rtol=1e-8, atol=1e-10
    )
    assert not orthogonal(torch.zeros(shape)).any()
