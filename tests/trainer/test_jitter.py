"""Noise on what routers read: its numbers, the same for a token whoever has it, and its
gradient."""

from __future__ import annotations

import pytest
import torch

from orchestrator.plan.model import Moe
from tests.beds.plans import tiny_model
from trainer.model.dropout import Jitter, draws, seed_dropout
from trainer.model.router import Router

MOE = Moe(experts=8, top_k=2, ffn_hidden=16)
_ALL = (1 << 64) - 1


def jitter(rate: float = 0.25, width: int = 64, seed: int = 3) -> Jitter:
    stage = torch.nn.Module()
    stage.jitter = Jitter(rate, width)
    seed_dropout(stage, seed)
    return stage.jitter


def mixed(x: int) -> int:
    x = ((x ^ (x >> 32)) * 0xFF51AFD7ED558CCD) & _ALL
    x = ((x ^ (x >> 29)) * 0xC4CEB9FE1A85EC53) & _ALL
    return x ^ (x >> 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numbers_are_those_of_the_definition(dtype):
    module = jitter()
    serial = torch.tensor([0, 5, 1 << 40])
    factors = module(torch.ones(3, 64, dtype=dtype), serial)
    for row, number in enumerate(serial.tolist()):
        ahead = mixed((number * 0x9E3779B97F4A7C15 + int(module.salt)) & _ALL)
        for column in (0, 1, 63):
            drawn = (ahead * (mixed((column * 0x9E3779B97F4A7C15) & _ALL) | 1)) & _ALL
            assert float(factors[row, column]) == pytest.approx(
                0.75 + 0.5 * (drawn >> 40) / (1 << 24), rel=1e-6
            )


def test_they_are_equally_distributed_around_one_and_differ():
    factors = jitter(0.25)(torch.ones(4096, 64), torch.arange(4096))
    assert 0.75 <= float(factors.min()) < 0.7501 and 1.2499 < float(factors.max()) <= 1.25
    assert float(factors.mean()) == pytest.approx(1.0, abs=1e-3)
    assert float(factors.var()) == pytest.approx(0.5**2 / 12, rel=0.01)
    assert torch.corrcoef(factors[:, :8].T).fill_diagonal_(0).abs().max() < 0.06
    assert not torch.equal(jitter(seed=4)(torch.ones(1, 64), torch.tensor([0])), factors[:1])


def test_part_of_the_tokens_get_what_they_get_among_all():
    module = jitter()
    x = torch.randn(10, 64)
    full_output = module(x, torch.arange(10) + 100)
    assert torch.equal(module(x[[7, 2]], torch.tensor([107, 102])), full_output[[7, 2]])


def test_its_gradient_is_that_of_the_product():
    module = jitter()
    serial = torch.arange(6)
    x = torch.randn(6, 64, dtype=torch.float64, requires_grad=True)
    factor = module(torch.ones_like(x), serial).detach()
    (gradient,) = torch.autograd.grad((module(x, serial) ** 3).sum(), x)
    torch.testing.assert_close(gradient, 3 * (x * factor).square().detach() * factor)


def test_it_is_off_by_default_and_0_is_off():
    for moe, on in ((MOE, False), (Moe(experts=8, top_k=2, ffn_hidden=16, jitter=0.0), False)):
        model = tiny_model(moe=moe)
        assert (Router(model, moe).jitter is not None) == on == draws(model)
    noisy = Moe(experts=8, top_k=2, ffn_hidden=16, jitter=0.01)
    model = tiny_model(moe=noisy)
    router = Router(model, noisy)
    assert router.jitter is not None and draws(model) and draws(tiny_model(dropout=0.1))
    with pytest.raises(AssertionError, match="number"):
        router(torch.zeros(2, model.hidden))
