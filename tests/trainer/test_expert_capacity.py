"""Experts that take a bounded number of tokens: which they take, what is reported, what cells of
verify meet."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.document import Moe
from orchestrator.plan.expert_capacity import expert_capacity, taken_choices
from orchestrator.verify.expert_models import ALL_CHOSEN, CAPPED, FEW_TOKENS, IDLE, ONE_TAKES_ALL
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.test_expert_load import told_by
from tests.trainer.together import run_together, told, world
from trainer.model.capacity import first_choices
from trainer.model.router import Router
from trainer.verify import oracle


def moe(experts=4, top_k=2, factor=1.0):
    return Moe(experts=experts, top_k=top_k, ffn_hidden=8, capacity_factor=factor)


@given(st.data())
def test_an_expert_takes_the_first_of_each_sequence(data):
    b, s, k, experts, capacity = (
        data.draw(st.integers(low, high)) for low, high in ((0, 3), (1, 9), (1, 3), (3, 5), (1, 9))
    )
    seed = data.draw(st.integers(0, 1 << 20))
    chosen = torch.rand(b, s, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)[
        ..., :k
    ]
    expected = torch.zeros(b, s, k, dtype=torch.bool)
    for sequence in range(b):
        loads = [0] * experts
        for token in range(s):
            for choice in range(k):
                expert = int(chosen[sequence, token, choice])
                expected[sequence, token, choice] = loads[expert] < capacity
                loads[expert] += 1
    assert torch.equal(first_choices(chosen, experts, capacity), expected)
    if s > 1:  # what an expert takes does not depend on later tokens
        assert torch.equal(first_choices(chosen[:, :-1], experts, capacity), expected[:, :-1])


@given(
    st.integers(1, 64), st.integers(1, 8), st.integers(1, 4096), st.decimals("0.01", "16", places=2)
)
def test_the_bound_is_the_factor_times_an_equal_share_rounded_up(experts, top_k, seq_len, factor):
    top_k = min(top_k, experts)
    mixture = moe(experts, top_k, float(factor))
    exact = Fraction(factor) * top_k * seq_len / experts
    assert expert_capacity(mixture, seq_len) - 1 < exact <= expert_capacity(mixture, seq_len)
    assert taken_choices(mixture, seq_len) == pytest.approx(
        min(top_k, expert_capacity(mixture, seq_len) * experts / seq_len)
    )


def test_without_a_factor_every_choice_is_taken():
    plain = Moe(experts=4, top_k=2, ffn_hidden=8)
    assert expert_capacity(plain, 100) is None and taken_choices(plain, 100) == 2


CASES = {
    "dp4": dict(dp=4, micro_batches=2),
    "ep2 tp2": dict(ep=2, tp=2, micro_batches=4),
    "cp2 tp2 etp1, folded": dict(cp=2, tp=2, etp=1, fold_cp=True, micro_batches=8),
    "cp2 pp2": dict(cp=2, pp=2, micro_batches=8),
}


@pytest.mark.process
def test_every_layout_reports_the_same_share_of_dropped_choices():
    model = tiny_model(layers=2, bias=False, moe=moe(factor=0.75))
    assert {world(case) for case in CASES.values()} == {4}
    plans = {name: make_plan(model=model, **case) for name, case in CASES.items()}
    dropped_shares = {}
    for name, answers in run_together(
        told_by, 4, {name: (plan,) for name, plan in plans.items()}
    ).items():
        with told(name):
            dropped_shares[name] = {
                layer: load["dropped"] for answer in answers for layer, load in answer.items()
            }
            assert sorted(dropped_shares[name]) == ["0", "1"]
    assert all(layer_shares == dropped_shares["dp4"] for layer_shares in dropped_shares.values())
    assert all(0.25 <= share < 0.6 for share in dropped_shares["dp4"].values()), (
        "a factor of 0.75 drops a quarter at least"
    )


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        (ONE_TAKES_ALL, lambda counts, tokens: max(counts) == tokens and sorted(counts)[-2] == 0),
        (IDLE, lambda counts, tokens: counts.count(0) >= 2),
        (
            FEW_TOKENS,
            lambda counts, tokens: (
                3 * tokens // 4 < len(counts) and counts.count(0) > len(counts) // 4
            ),
        ),
        (ALL_CHOSEN, lambda counts, tokens: set(counts) == {tokens}),
        (CAPPED, lambda counts, tokens: max(counts) > 0.75 * sum(counts) / len(counts)),
    ],
    ids=["one takes all", "idle", "few tokens", "all chosen", "capped"],
)
def test_the_corner_cells_of_verify_are_what_they_are_called(fields, meant, monkeypatch):
    """Each is judged by a layer's choices of the whole batch in the second step."""
    counts = []
    original = Router.forward

    def forward(self, x, serial=None):
        routing = original(self, x, serial)
        counts.append(
            (torch.bincount(routing.experts.flatten(), minlength=self.moe.experts).tolist(), len(x))
        )
        return routing

    monkeypatch.setattr(Router, "forward", forward)
    plan = make_plan(model=tiny_model(**fields), dp=1, seq_len=16, micro_batches=2)
    oracle.train(plan, 2)
    assert len(counts) == 2 * plan.model.layers
    for layer, tokens in counts[plan.model.layers :]:
        assert meant(layer, tokens), (layer, tokens)
