"""Dispatch to experts on several ranks against all experts on one, and what it sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from orchestrator.plan.document import Moe
from tests.trainer.samples import LLAMA, small
from trainer.comm.collectives import CommCounter
from trainer.model.experts import Dispatch, Experts, dispatch
from trainer.model.router import Routing
from trainer.parallel.expert.dispatch import ExpertDispatch
from trainer.verify.ranks import run_ranks

MOE = Moe(experts=6, top_k=2, ffn_hidden=12)
MODEL = small(**LLAMA, moe=MOE)
DOMAIN = (0, 0, 1)  # of three ranks


def choices(case: str, tokens: int, seed: int) -> torch.Tensor:
    """int64 [tokens, 2]: different experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    if case == "spread":
        return torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(tokens)])
    return torch.tensor([[4, 5]] if case == "two experts take all" else [[0, 3]]).expand(tokens, 2).contiguous()


def case_of(case: str, rank: int) -> tuple[torch.Tensor, Routing]:
    tokens = 0 if case == "a rank without tokens" and rank == 1 else 3 + 4 * rank
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=generator)
    weights = torch.rand(tokens, 2, dtype=torch.float64, generator=generator)
    chosen = choices("spread" if case == "a rank without tokens" else case, tokens, rank) if tokens else None
    chosen = torch.empty(0, 2, dtype=torch.int64) if chosen is None else chosen
    return x.requires_grad_(), Routing(chosen, weights.requires_grad_(), weights, weights)


def experts_of(part: slice, width: slice = slice(None)) -> Experts:
    """The experts `part`, and of each the features `width` of its inner dimension."""
    experts = Experts(MODEL, MOE).double()
    torch.manual_seed(3)
    for name, param in experts.named_parameters():
        whole = torch.randn(param.shape, dtype=torch.float64)[part]
        param.data = (whole[:, :, width] if name.startswith("down") else whole[:, width]).contiguous()
    return experts


def run(case: str, rank: int, by: Dispatch, experts: Experts) -> dict:
    """The rank's tokens through `experts` and back, forward and backward."""
    x, routing = case_of(case, rank)
    out = by(x, routing, experts)
    out.backward(torch.full_like(out, 2.0) * (1 + rank))
    grads = {name: param.grad for name, param in experts.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": routing.weights.grad, "experts": grads}


def compare(found: dict, expected: dict, atol: float) -> None:
    for what in ("out", "x", "weights"):
        torch.testing.assert_close(found[what], expected[what], rtol=1e-12, atol=atol)


@pytest.mark.process
@pytest.mark.parametrize("case", ["spread", "two experts take all", "one expert a rank", "a rank without tokens"])
def test_tokens_come_back_as_if_all_experts_were_here(case):
    ranks = 3

    def on(rank: int) -> dict:
        experts, counter = experts_of(slice(rank * 2, rank * 2 + 2)), CommCounter()
        levels = ["nvlink" if DOMAIN[other] == DOMAIN[rank] else "network" for other in range(ranks)]
        found = run(case, rank, ExpertDispatch(dist.group.WORLD, None, counter, levels), experts)
        return found | {"bytes": counter.bytes["ep"], "levels": dict(counter.levels)}

    found = run_ranks(on, ranks)
    experts = experts_of(slice(0, 6))
    for rank in range(ranks):
        compare(found[rank], run(case, rank, dispatch, experts), atol=1e-12)
        routing = case_of(case, rank)[1]
        away = int((routing.experts // 2 != rank).sum())
        arrived = sum(int((case_of(case, r)[1].experts // 2 == rank).sum()) for r in range(ranks) if r != rank)
        # there and back, forward and backward: a row of 32 each; a weight there, its gradient back; the counts
        rows, weights, counts = 2 * 8 * 32 * (away + arrived), 8 * (away + arrived), 8 * 6 * 2 // 3
        assert found[rank]["bytes"] == rows + weights + counts
        assert sum(found[rank]["levels"].values()) == rows + weights
        outside = [other for other in range(ranks) if DOMAIN[other] != DOMAIN[rank]]
        out = sum(int((routing.experts // 2 == other).sum()) for other in outside)
        into = sum(int((case_of(case, other)[1].experts // 2 == rank).sum()) for other in outside)
        assert found[rank]["levels"]["network"] == (out + into) * (2 * 8 * 32 + 8)
    for name, param in experts.named_parameters():
        mine = torch.cat([found[rank]["experts"][name] for rank in range(ranks)])
        torch.testing.assert_close(mine, param.grad, rtol=1e-12, atol=1e-10)


@pytest.mark.process
@pytest.mark.parametrize("case", ["spread", "two experts take all", "a rank without tokens"])
@pytest.mark.parametrize("expert_ranks", [1, 2])
def test_experts_cut_over_tensor_parallel_ranks(case, expert_ranks):
    """2 slices of each expert; ranks (expert, slice) number slices first."""

    def on(rank: int) -> dict:
        over_slices, over_experts = None, None
        for first in range(expert_ranks):
            group = dist.new_group([2 * first, 2 * first + 1])
            over_slices = group if rank // 2 == first else over_slices
        for first in range(2 if expert_ranks > 1 else 0):
            group = dist.new_group([first, first + 2])
            over_experts = group if rank % 2 == first else over_experts
        expert, part = divmod(rank, 2)
        share = 6 // expert_ranks
        experts = experts_of(slice(expert * share, (expert + 1) * share), slice(part * 6, part * 6 + 6))
        levels = ["network"] * expert_ranks
        return run(case, rank, ExpertDispatch(over_experts, over_slices, CommCounter(), levels), experts)

    ranks = 2 * expert_ranks
    found = run_ranks(on, ranks)
    experts = experts_of(slice(0, 6))
    for rank in range(ranks):
        compare(found[rank], run(case, rank, dispatch, experts), atol=1e-11)
    for name, param in experts.named_parameters():
        dim = 2 if name.startswith("down") else 1
        parts = [found[rank]["experts"][name] for rank in range(ranks)]
        whole = torch.cat([torch.cat(parts[2 * e : 2 * e + 2], dim=dim) for e in range(expert_ranks)])
        torch.testing.assert_close(whole, param.grad, rtol=1e-12, atol=1e-10)
