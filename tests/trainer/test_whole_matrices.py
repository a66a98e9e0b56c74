"""An optimizer that needs whole matrices equals one process: each is updated by its owner and
published."""

from __future__ import annotations

import pytest
import torch

from orchestrator.plan.learning_rate import learning_rate
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import GPT, engine_of
from tests.trainer.states import saved_and_resumed
from tests.trainer.together import assert_equal, run_together, told, world
from trainer.model.init import init_stage
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage
from trainer.optim.adamw import AdamW
from trainer.optim.owners import map_whole_matrices, rounds
from trainer.optim.rule import Rules
from trainer.precision import FP64
from trainer.verify.compare import LIMIT, STEPS, run_rank
from trainer.verify.oracle import Outcome
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch, step_batches


class Normalised:
    """Weights move by lr times their momentum over its Frobenius norm: no element can be updated
    alone."""

    kinds = ("momentum",)

    def step(self, matrices, update, counter):
        for indices in rounds([matrix.cuts for matrix in matrices]):
            these = [matrices[at] for at in indices]
            momenta = [
                0.9 * owned_matrix.state["momentum"] + owned_matrix.grad for owned_matrix in these
            ]
            moved = map_whole_matrices(
                momenta, [owned_matrix.cuts for owned_matrix in these], counter, self.normalised
            )
            for matrix, momentum, direction in zip(these, momenta, moved, strict=True):
                update.set(matrix.state["momentum"], momentum)
                update.set(matrix.master, matrix.master - update.lr * direction)

    def normalised(self, momentum):
        return momentum / momentum.norm()


@pytest.fixture(autouse=True)
def whole_matrices(monkeypatch):
    monkeypatch.setattr(
        "trainer.engine.rules_of", lambda optim, seed: Rules(AdamW(optim), Normalised())
    )


def is_normalised(name, param):
    return param.dim() == 2 and name.split(".")[0] == "layers"


def one_process(plan, steps=STEPS):
    """The rule from its formula, AdamW by torch."""
    stage = Stage(plan.model, range(plan.model.layers), True, True).double()
    init_stage(stage, plan.model, plan.job.train.seed)
    params = dict(stage.named_parameters())
    optim = plan.job.optim
    size = plan.parallel.global_batch_samples
    momenta = {
        name: torch.zeros_like(param)
        for name, param in params.items()
        if is_normalised(name, param)
    }
    rest = [
        (param, optim.weight_decay * (param.dim() > 1))
        for name, param in params.items()
        if name not in momenta
    ]
    adamw = torch.optim.AdamW(
        [{"params": [param], "weight_decay": decay} for param, decay in rest],
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    outcomes = []
    for step in range(1, steps + 1):
        batch = micro_batch(plan, list(range((step - 1) * size, step * size)))
        loss = cross_entropy_sum(stage(None, batch), batch.targets) / batch.valid_tokens
        stage.zero_grad()
        loss.backward()
        grads = {name: param.grad.clone() for name, param in params.items()}
        norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), plan.job.train.clip_grad_norm)
        lr = learning_rate(step, optim, plan.job.train.steps)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        with torch.no_grad():
            for name, momentum in momenta.items():
                momentum.mul_(0.9).add_(params[name].grad)
                params[name].sub_(lr * momentum / momentum.norm())
        weights = {name: param.detach().clone() for name, param in params.items()}
        outcomes.append(Outcome(loss.item(), norm.item(), grads, weights))
    return outcomes


TIED = tiny_model(**GPT, tied_embeddings=True)
CASES = {
    "one process": {},
    "dp2 zero0": dict(dp=2),
    "dp2 zero1 many buckets": dict(dp=2, zero=1, bucket_bytes=1 << 10),
    "dp4 zero1": dict(dp=4, zero=1, model=TIED),
    "dp2 zero2": dict(dp=2, zero=2, micro_batches=3),
    "dp4 zero1 hybrid": dict(dp=4, zero=1, zero_group=2),
    "tp2": dict(tp=2, sp=False, model=TIED),
    "tp2 dp2 zero1": dict(tp=2, dp=2, zero=1),
    "tp4 one kv head": dict(tp=4, model=tiny_model(kv_heads=1)),
    "dp2 zero3": dict(dp=2, zero=3, micro_batches=3),
    "dp4 zero3, rows that do not divide": dict(dp=4, zero=3, model=tiny_model(ffn_hidden=42)),
    "dp4 zero3 hybrid": dict(dp=4, zero=3, zero_group=2),
    "tp2 dp2 zero3": dict(tp=2, dp=2, zero=3, model=TIED),
    "pp2 zero1 dp2": dict(pp=2, dp=2, zero=1, schedule="zb_h1", model=TIED),
}


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_owners_update_whole_matrices_in_every_layout(ranks):
    tasks = {}
    for name, case in CASES.items():
        if world(case) == ranks:
            plan = make_plan(**case)
            tasks[name] = (plan, FP64, one_process(plan))
    for case, answers in run_together(run_rank, ranks, tasks).items():
        with told(case):
            assert_equal(answers, LIMIT[torch.float64])


def test_a_skipped_update_changes_nothing():
    engine = engine_of(make_plan(), 0, FP64)
    for nan in (False, True):
        _, norm = engine.gradients(*step_batches(engine.plan, engine.mesh.coord, 0))
        if nan:
            for bucket in engine.buckets.buckets:
                bucket.grad_shard.fill_(torch.nan)
            norm = torch.tensor(torch.nan, dtype=torch.float64)
        before = [state_slice.tensor.clone() for state_slice in engine.optimizer.slices()]
        engine.update(norm, 1e-2)
        unchanged = [
            torch.equal(state_slice.tensor, old)
            for state_slice, old in zip(engine.optimizer.slices(), before, strict=True)
        ]
        assert all(unchanged) if nan else not any(unchanged)


@pytest.mark.process
def test_each_matrix_has_one_owner_and_owners_have_alike(monkeypatch):
    """Under ZeRO-1 over four ranks the largest share is near a quarter."""

    def work(rank):
        engine = engine_of(make_plan(dp=4, zero=1, bucket_bytes=1), rank)
        return {
            s.info.name: s.stop
            for s in engine.optimizer.slices()
            if s.kind == "momentum" and s.writes
        }

    shares = run_ranks(work, 4)
    names = [name for share in shares for name in share]
    assert len(names) == len(set(names)) == 4 * 7
    assert (
        max(sum(share.values()) for share in shares)
        <= 1.2 * sum(sum(share.values()) for share in shares) / 4
    )


@pytest.mark.process
@pytest.mark.parametrize("zero", [1, 3])
def test_saved_by_owners_and_resumed_by_others(tmp_path, zero):
    """Momenta follow their matrices to another owner, and parameters of the other rule have no
    momenta."""
    first = make_plan(dp=4, zero=4 - zero, micro_batches=1)
    second = make_plan(tp=2, dp=2, zero=zero, micro_batches=2)
    expected = one_process(first)
    saved_and_resumed(tmp_path, first, second, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.process
def test_ranks_share_the_work_on_whole_matrices():
    """Each matrix is computed once in all, and no rank has more than a matrix too many."""
    done = []

    def counted(momentum):
        done.append(list(momentum.shape))
        return momentum / momentum.norm()

    def work(rank, plan):
        done.clear()
        Normalised.normalised = staticmethod(counted)
        engine = engine_of(plan, rank)
        engine.update(engine.gradients(*step_batches(plan, engine.mesh.coord, 0))[1], 1e-3)
        return sorted(done)

    cases = {
        "tp2 dp2 zero3": dict(tp=2, dp=2, zero=3),
        "tp4 one kv head": dict(tp=4, model=tiny_model(kv_heads=1)),
    }
    for name, answers in run_together(
        work, 4, {name: (make_plan(**case),) for name, case in cases.items()}
    ).items():
        with told(name):
            shapes = [[32, 32], [8, 32], [8, 32], [32, 32], [48, 32], [48, 32], [32, 48]]
            if cases[name]["tp"] == 2:
                shapes[1:3] = [[16, 32]] * 2
            assert sorted(shape for rank_shapes in answers for shape in rank_shapes) == sorted(
                4 * shapes
            )
            assert [len(rank_shapes) for rank_shapes in answers] == [7] * 4
