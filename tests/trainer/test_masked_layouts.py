"""Training on masked tokens: every layout computes what one process computes.

One process hides the tokens by `trainer.verify.plain_masked`, the layouts by the trainer's
objective.
"""

from __future__ import annotations

import pytest
import torch
from msgspec import UNSET, structs

from orchestrator.plan.document import Moe, Mtp
from orchestrator.plan.trained import problems
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.pairs import launches
from tests.trainer.parity_cases import GQA
from tests.trainer.samples import BERT, GPT, MHA
from tests.trainer.test_parity import assert_equal_to_one_process

MODEL = tiny_model(**BERT, **MHA)
UNTIED = tiny_model(**BERT | {"tied_embeddings": False}, kv_heads=1)
DROPS = tiny_model(**BERT, **MHA, dropout=0.1)
BEFORE = tiny_model(**GPT | {"causal": False}, **MHA)  # with norms before the halves
LAYOUTS = {
    "accumulation": dict(micro_batches=3, micro_batch_size=2),
    "dp2 zero1": dict(dp=2, zero=1, bucket_bytes=1 << 10),
    "dp2 zero2": dict(dp=2, zero=2),
    "dp2 zero3": dict(dp=2, zero=3),
    "dp2 zero3 untied, full": dict(dp=2, zero=3, model=UNTIED, recompute="full"),
    "dp3 unequal": dict(dp=3, zero=1, replica_micro_batches=[2, 1, 1]),
    "tp2": dict(tp=2, micro_batch_size=2),
    "tp2 without sp": dict(tp=2, sp=False),
    "tp4 untied": dict(tp=4, model=UNTIED),
    "tp2, 2 pieces": dict(tp=2, tp_pieces=2),
    "tp2 selective": dict(tp=2, recompute="selective"),
    "dropout, tp2 full": dict(tp=2, recompute="full", model=DROPS),
    "pp2": dict(pp=2, micro_batches=3),
    "pp2 interleaved, packed": dict(
        pp=2, vpp=2, schedule="interleaved", micro_batches=4, packed=True
    ),
    "pp2 zb_h1 untied": dict(pp=2, schedule="zb_h1", micro_batches=4, model=UNTIED),
    "tp2 pp2 zbv": dict(tp=2, pp=2, vpp=2, schedule="zbv", micro_batches=4),
    "pp2 dualpipe": dict(pp=2, schedule="dualpipe", micro_batches=4),
    "tp2 pp2 zb_h2 without sp": dict(tp=2, pp=2, sp=False, schedule="zb_h2", micro_batches=4),
    "cp2 ring": dict(cp=2, cp_method="ring"),
    "cp2 zigzag": dict(cp=2),
    "cp2 allgather": dict(cp=2, cp_method="allgather"),
    "cp2 ulysses": dict(cp=2, cp_method="ulysses"),
    "cp4 zigzag untied": dict(cp=4, model=UNTIED),
    "cp2 ring packed": dict(cp=2, cp_method="ring", packed=True),
    "cp2 zigzag packed, selective": dict(cp=2, packed=True, recompute="selective"),
    "cp2 allgather packed": dict(cp=2, cp_method="allgather", packed=True),
    "cp2 ulysses packed": dict(cp=2, cp_method="ulysses", packed=True),
    "cp2 allgather dropout": dict(cp=2, cp_method="allgather", model=DROPS),
    "cp2 zigzag dropout packed": dict(cp=2, model=DROPS, packed=True),
    "norms before, tp2 cp2": dict(tp=2, cp=2, model=BEFORE),
    "norms before, pp2 packed": dict(pp=2, model=BEFORE, packed=True),
    "tp2 cp2 pp2": dict(tp=2, cp=2, pp=2),
    "tp2 pp2 dp2 zero1 packed": dict(tp=2, pp=2, dp=2, zero=1, packed=True),
}
CASES = {(name,): {"model": MODEL, **layout} for name, layout in LAYOUTS.items()}


@pytest.mark.process
@pytest.mark.parametrize("cases", launches(CASES, CASES))
def test_layouts_equal_one_process(cases):
    assert_equal_to_one_process(cases, torch.float64)


def test_what_does_not_go_together_is_refused_in_one_line():
    def with_objective(plan, objective):
        train = structs.replace(plan.job.train, objective=objective)
        return structs.replace(plan, job=structs.replace(plan.job, train=train))

    plan = make_plan(model=MODEL, tp=2, cp=2)
    assert list(problems(plan)) == []
    (problem,) = problems(with_objective(plan, UNSET))
    assert "is not causal" in problem and "legal: train.objective=masked" in problem
    (problem,) = problems(with_objective(make_plan(model=GQA), "masked"))
    assert "with the causal model test" in problem and "legal: next_token" in problem
    (problem,) = problems(make_plan(model=structs.replace(BEFORE, mtp=Mtp(depth=1))))
    assert "legal: model.mtp.depth=0" in problem
    moe = tiny_model(**BERT | {"bias": False}, moe=Moe(experts=4, top_k=2, ffn_hidden=8))
    (problem,) = problems(make_plan(model=moe))
    assert problem.startswith("model.block=post_norm with experts")
