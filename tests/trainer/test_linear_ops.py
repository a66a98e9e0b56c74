"""One object a linear operation: what replaces it works in every layout, here a masked weight and a
rounded input."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.nn.functional as F

from tests.beds.plans import make_plan, tiny_model
from tests.trainer import samples
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.model.linear import Linear, LinearOp
from trainer.precision import FP64
from trainer.verify import oracle
from trainer.verify.compare import LIMIT, STEPS, run_rank

STEP = 2.0**-6  # inputs are rounded to its multiples


class MaskedAndRounded(LinearOp):
    """round(x) @ (weight * mask).T; keeps whole numbers of 16 bits of the input, as a low precision
    would."""

    def __init__(self, mask):
        self.mask = mask

    def forward(self, x, weight, bias):
        return F.linear((x / STEP).round() * STEP, weight * self.mask, bias)

    def saved(self, x):
        return (x / STEP).round().to(torch.int16), torch.full((), STEP, dtype=x.dtype)

    def input_grad(self, grad, weight):
        return grad @ (weight * self.mask)

    def weight_grad(self, grad, saved):
        codes, step = saved
        return (grad.flatten(0, -2).T @ (codes.flatten(0, -2) * step)) * self.mask


def mask_of(name, shape):
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7).double()


def linears(stage):
    names = {id(param): name for name, param in stage.named_parameters()}
    return [
        (names[id(module.weight)], module)
        for module in stage.modules()
        if isinstance(module, Linear)
    ]


def in_one_process(stage):
    """The same in autograd's own operations; the gradient passes the rounding as it is."""
    for name, linear in linears(stage):
        mask = mask_of(name, linear.weight.shape)

        def run(linear, x, mask=mask):
            return F.linear(
                x + ((x / STEP).round() * STEP - x).detach(), linear.weight * mask, linear.bias
            )

        linear.run = run


def on_a_rank(engine):
    for stage in engine.part.stages:
        for name, linear in linears(stage):
            info = engine.part.table[name]
            linear.op = MaskedAndRounded(info.take(mask_of(name, info.global_shape)))


GQA = tiny_model()
TIED = tiny_model(tied_embeddings=True)
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)
CASES = {
    "one process": dict(),
    "full recompute": dict(recompute="full"),
    "selective recompute": dict(recompute="selective", model=GPT),
    "split backward, tied": dict(schedule="zb_h1", model=TIED),
    "tp2": dict(tp=2, sp=False, model=GPT),
    "tp2 sp": dict(tp=2, micro_batch_size=2),
    "tp2 sp full recompute": dict(tp=2, recompute="full", model=TIED),
    "tp2 sp selective recompute": dict(tp=2, recompute="selective"),
    "tp2 split backward": dict(tp=2, schedule="zb_h1", sp=False),
    "cp2": dict(cp=2),
    "dp2 zero2": dict(dp=2, zero=2),
    "dp2 zero3": dict(dp=2, zero=3),
    "pp2 zbv": dict(pp=2, vpp=2, schedule="zbv", micro_batches=3, model=TIED),
    "tp2 pp2 zb_h1 selective": dict(
        tp=2, pp=2, schedule="zb_h1", micro_batches=3, recompute="selective", model=GPT
    ),
    "tp2 sp pp2 dualpipe full": dict(
        tp=2, pp=2, schedule="dualpipe", micro_batches=4, recompute="full", model=TIED
    ),
    "tp4 sp one kv head": dict(tp=4, model=tiny_model(kv_heads=1)),
}


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_op_that_replaces_the_product_equals_one_process_in_every_layout(ranks):
    tasks = {}
    for name, case in CASES.items():
        if world(case) == ranks:
            plan = make_plan(**({"model": GQA} | case))
            plain = oracle.train(plan, 1)
            expected = oracle.train(plan, STEPS, prepare=in_one_process)
            assert abs(plain[0].loss - expected[0].loss) > 1e-4, "the op must change something"
            tasks[name] = (plan, FP64, expected, False, on_a_rank)
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            assert_equal(answers, LIMIT[torch.float64])
