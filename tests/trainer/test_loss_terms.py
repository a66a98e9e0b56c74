"""Terms that modules of any stage add to the loss: gradients and metrics equal one process in every
layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.beds.plans import make_plan, tiny_model
from tests.trainer import samples
from tests.trainer.samples import engine_of
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.model.loss import LossTerms
from trainer.optim.loss_scale import LossScale
from trainer.precision import FP64
from trainer.verify import oracle
from trainer.verify.compare import LIMIT, STEPS, run_rank
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import step_batches

#: Of a term with a divisor of its own.
DIVISOR = 300.0


def square(x):
    return 0.3 * x.square().mean(-1).sum()


def cube(x):
    return (x**3).sum() / x.shape[-1]


class Term(nn.Module):
    """Passes a hidden state on."""

    def __init__(self, terms):
        super().__init__()
        self.terms = terms

    def forward(self, x):
        x = self.terms.add("square", x, square(x))
        return self.terms.add("cube", x, cube(x), DIVISOR)


class Kept(nn.Module):
    """The same for one process: keeps what it has seen, for autograd."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        self.seen.append(x)
        return x


def put(stage, make_term):
    """Puts a term into each block, inside of what is recomputed, and before the head."""
    for block in stage.blocks.values():
        block.mlp_in = nn.Sequential(make_term(), block.mlp_in)
    if stage.last:
        stage.head_in = nn.Sequential(make_term(), stage.head_in)


def in_one_process(stage):
    seen = []
    put(stage, lambda: Kept(seen))

    def added(valid_tokens):
        tensors = list(seen)
        seen.clear()
        return {
            "square": sum(map(square, tensors)) / valid_tokens,
            "cube": sum(map(cube, tensors)) / DIVISOR,
        }

    return added


def on_a_rank(engine):
    engine.part.terms.declare("square", "cube")
    for stage in engine.part.stages:
        put(stage, lambda: Term(engine.part.terms))


GQA = tiny_model()
TIED = tiny_model(tied_embeddings=True)
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)
CASES = {
    "one process": dict(micro_batches=3),
    "full": dict(recompute="full"),
    "selective": dict(recompute="selective", model=GPT),
    "dp2 zero2": dict(dp=2, zero=2),
    "dp2 zero3 full": dict(dp=2, zero=3, recompute="full"),
    "dp3 zero3 unequal": dict(dp=3, zero=3, replica_micro_batches=[2, 1, 1]),
    "tp2 without sp": dict(tp=2, sp=False, model=GPT),
    "tp2 sp": dict(tp=2, micro_batch_size=2),
    "tp2 sp full": dict(tp=2, recompute="full"),
    "tp2 selective": dict(tp=2, recompute="selective", sp=False),
    "cp2": dict(cp=2),
    "tp2 cp2": dict(tp=2, cp=2),
    "pp2 afab": dict(pp=2, schedule="afab", micro_batches=3),
    "pp2 1f1b full": dict(pp=2, recompute="full", micro_batches=3, model=TIED),
    "pp2 interleaved": dict(pp=2, vpp=2, schedule="interleaved", micro_batches=4),
    "pp2 zb_h1": dict(pp=2, schedule="zb_h1", micro_batches=3, recompute="selective"),
    "pp2 zb_h2": dict(pp=2, schedule="zb_h2", micro_batches=3),
    "pp2 zbv full": dict(
        pp=2, vpp=2, schedule="zbv", micro_batches=3, recompute="full", model=TIED
    ),
    "pp2 dualpipe": dict(pp=2, schedule="dualpipe", micro_batches=4, model=TIED),
    "pp2 dualpipev": dict(pp=2, vpp=2, schedule="dualpipev", micro_batches=4),
    "tp2 sp pp2 zb_h1": dict(tp=2, pp=2, schedule="zb_h1", micro_batches=3),
    "tp2 pp2 without sp": dict(tp=2, pp=2, sp=False, micro_batches=3, model=TIED),
    "dp2 pp2 zero1 zbv": dict(dp=2, pp=2, vpp=2, zero=1, schedule="zbv", micro_batches=3),
}


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_terms_of_every_stage_equal_one_process_in_every_layout(ranks):
    tasks = {}
    references = {}
    for name, case in CASES.items():
        if world(case) == ranks:
            plan = make_plan(**({"model": GQA} | case))
            key = repr(plan.model), plan.parallel.global_batch_samples
            if key not in references:
                references[key] = oracle.train(plan, STEPS, prepare=in_one_process)
            tasks[name] = (plan, FP64, references[key], False, on_a_rank)
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            for worst in answers:
                assert {"term square", "term cube"} <= set(worst)
            assert_equal(answers, LIMIT[torch.float64])


def test_a_scaled_loss_scales_its_terms():
    """fp16: gradients of terms are multiplied by the loss scale like all others, and divided with
    them."""
    plan = make_plan(micro_batches=2)
    grads = {}
    for scale in (1.0, 1024.0):
        engine = engine_of(plan, 0, FP64)
        engine.scaler = LossScale(initial=scale)
        on_a_rank(engine)
        engine.gradients(*step_batches(plan, engine.mesh.coord, 0))
        grads[scale] = engine.buckets.full_grads(), engine.loss_terms()
    for name, grad in grads[1.0][0].items():
        torch.testing.assert_close(grads[1024.0][0][name] / 1024.0, grad, rtol=1e-12, atol=1e-14)
    assert grads[1.0][1] == grads[1024.0][1]


def test_a_term_that_is_not_declared_is_refused():
    terms = LossTerms()
    terms.declare("balance")
    with pytest.raises(ValueError, match="'z' is not declared; declared: balance"):
        terms.add("z", torch.zeros(1), torch.zeros(()))


@pytest.mark.process
def test_terms_of_a_compiled_block_count_each_step():
    """The counters of a step are no constants of the compiled program. It is compiled in a process
    of its own: torch's compiler starts threads, which do not survive the forks of later tests."""
    plan = make_plan(micro_batches=1, compile=True)

    def squares_of_steps(rank):
        engine = engine_of(plan, rank)
        on_a_rank(engine)
        squares = []
        for valid in (16, 32):
            batches, _ = step_batches(plan, engine.mesh.coord, 0)
            engine.gradients(batches, valid)
            squares.append(engine.loss_terms()["square"])
        return squares

    (squares,) = run_ranks(squares_of_steps, 1)
    assert squares[0] == pytest.approx(2 * squares[1], rel=1e-6) and squares[0] > 0
