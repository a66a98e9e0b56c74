"""Dispatch to experts on several ranks against all experts on one, and what it sends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from orchestrator.cost.time.collective import sent_bytes
from orchestrator.cost.time.expert_exchange import phases
from orchestrator.cost.time.fabric import Fabric
from orchestrator.cost.time.layer_traffic import expert_operations
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Moe
from tests.beds.plans import make_plan
from tests.independent.oracle.findings import ALLOWED, rounding
from tests.trainer.samples import LLAMA, small
from trainer.comm.collectives import CommCounter
from trainer.model.experts import Dispatch, Experts, MixtureOfExperts, dispatch, nothing
from trainer.model.router import Routing
from trainer.parallel.expert.dispatch import ExpertDispatch
from trainer.parallel.expert.hierarchical import HierarchicalDispatch
from trainer.verify.ranks import run_ranks

MOE = Moe(experts=6, top_k=2, ffn_hidden=12)
MODEL = small(**LLAMA, moe=MOE)
DOMAIN = (0, 0, 1)  # of three ranks


def choices(case: str, tokens: int, seed: int) -> torch.Tensor:
    """int64 [tokens, 2]: different experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    if case == "spread":
        return torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(tokens)])
    return (
        torch.tensor([[4, 5]] if case == "two experts take all" else [[0, 3]])
        .expand(tokens, 2)
        .contiguous()
    )


def case_of(case: str, rank: int) -> tuple[torch.Tensor, Routing]:
    tokens = 0 if case == "a rank without tokens" and rank == 1 else 3 + 4 * rank
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, 32, dtype=torch.float64, generator=generator)
    weights = torch.rand(tokens, 2, dtype=torch.float64, generator=generator)
    chosen = (
        choices("spread" if case == "a rank without tokens" else case, tokens, rank)
        if tokens
        else None
    )
    chosen = torch.empty(0, 2, dtype=torch.int64) if chosen is None else chosen
    return x.requires_grad_(), Routing(chosen, weights.requires_grad_(), weights, weights)


def experts_of(expert_range: slice, width: slice = slice(None)) -> Experts:
    """The experts `expert_range`, and of each the features `width` of its inner dimension."""
    experts = Experts(MODEL, MOE).double()
    torch.manual_seed(3)
    for name, param in experts.named_parameters():
        weights = torch.randn(param.shape, dtype=torch.float64)[expert_range]
        param.data = (
            weights[:, :, width] if name.startswith("down") else weights[:, width]
        ).contiguous()
    return experts


def run(case: str, rank: int, by: Dispatch, experts: Experts) -> dict:
    """The rank's tokens through `experts` and back, forward and backward."""
    x, routing = case_of(case, rank)
    with pytest.MonkeyPatch.context() as patch:
        reads = list[torch.Size]()
        tolist = torch.Tensor.tolist
        patch.setattr(
            torch.Tensor, "tolist", lambda tensor: (reads.append(tensor.shape), tolist(tensor))[1]
        )
        out, _ = by(x, routing, experts, nothing)
    out.backward(torch.full_like(out, 2.0) * (1 + rank))
    grads = {name: param.grad for name, param in experts.named_parameters()}
    answer = {"out": out.detach(), "x": x.grad, "weights": routing.weights.grad, "experts": grads}
    return answer | {
        "reads": len(reads)
    }  # of counts: where they are on a device, the host waits for each


def compare(answer: dict, expected: dict) -> None:
    for key in ("out", "x", "weights"):
        assert_near(answer[key], expected[key])


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding: an element may be small because the products that it adds cancel."""
    products = 2 * MODEL.hidden * MOE.ffn_hidden
    atol = ALLOWED * rounding(products, torch.float64) * float(expected.norm())
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.process
@pytest.mark.parametrize(
    "case", ["spread", "two experts take all", "one expert a rank", "a rank without tokens"]
)
def test_tokens_come_back_as_if_all_experts_were_here(case):
    ranks = 3

    def on(rank: int) -> dict:
        experts = experts_of(slice(rank * 2, rank * 2 + 2))
        counter = CommCounter()
        levels = ["nvlink" if DOMAIN[peer] == DOMAIN[rank] else "network" for peer in range(ranks)]
        answer = run(case, rank, ExpertDispatch(dist.group.WORLD, None, counter, levels), experts)
        return answer | {"bytes": counter.bytes["ep"], "levels": dict(counter.levels)}

    answers = run_ranks(on, ranks)
    experts = experts_of(slice(0, 6))
    for rank in range(ranks):
        compare(answers[rank], run(case, rank, dispatch, experts))
        routing = case_of(case, rank)[1]
        away = int((routing.experts // 2 != rank).sum())
        arrived = sum(
            int((case_of(case, r)[1].experts // 2 == rank).sum()) for r in range(ranks) if r != rank
        )
        # there and back, forward and backward: a row of 32 each; a weight there, its gradient back;
        # the counts
        rows = 2 * 8 * 32 * (away + arrived)
        weights = 8 * (away + arrived)
        counts = 8 * 6 * 2 // 3
        assert answers[rank]["bytes"] == rows + weights + counts
        assert answers[rank]["reads"] == 2, (
            "of the dispatch, and of the experts that are computed one after another"
        )
        assert sum(answers[rank]["levels"].values()) == rows + weights
        outside = [peer_rank for peer_rank in range(ranks) if DOMAIN[peer_rank] != DOMAIN[rank]]
        out = sum(int((routing.experts // 2 == peer_rank).sum()) for peer_rank in outside)
        into = sum(
            int((case_of(case, peer_rank)[1].experts // 2 == rank).sum()) for peer_rank in outside
        )
        assert answers[rank]["levels"]["network"] == (out + into) * (2 * 8 * 32 + 8)
    for name, param in experts.named_parameters():
        gradient = torch.cat([answers[rank]["experts"][name] for rank in range(ranks)])
        assert_near(gradient, param.grad)


@pytest.mark.process
@pytest.mark.parametrize(
    "case", ["spread", "two experts take all", "one expert a rank", "a rank without tokens"]
)
@pytest.mark.parametrize(("domains", "inside"), [(2, 3), (3, 2), (3, 1)])
def test_tokens_go_once_to_each_domain(case, domains, inside):
    ranks = domains * inside
    experts_per_rank = 6 // ranks
    experts_per_domain = 6 // domains  # experts of a rank, of a domain

    def on(rank: int) -> dict:
        near = [dist.new_group([*range(d * inside, (d + 1) * inside)]) for d in range(domains)][
            rank // inside
        ]
        across = [dist.new_group([*range(i, ranks, inside)]) for i in range(inside)][rank % inside]
        experts = experts_of(slice(rank * experts_per_rank, (rank + 1) * experts_per_rank))
        counter = CommCounter()
        to = ExpertDispatch(near if inside > 1 else None, None, counter, ["nvlink"] * inside)
        levels = ["nvlink" if d == rank // inside else "network" for d in range(domains)]
        answer = run(case, rank, HierarchicalDispatch(across, to, counter, levels), experts)
        return answer | {"levels": dict(counter.levels)}

    answers = run_ranks(on, ranks)
    experts = experts_of(slice(0, 6))
    row = 8 * 32
    weight = 8
    label = 4
    for rank in range(ranks):
        compare(answers[rank], run(case, rank, dispatch, experts))
        sent = 0
        for peer in range(rank % inside, ranks, inside):  # its counterpart in each domain
            if peer != rank:
                out, into = (
                    case_of(case, r)[1].experts // experts_per_domain == d // inside
                    for r, d in ((rank, peer), (peer, rank))
                )
                # rows there and back, in both passes; weights there, their gradients back; labels
                # there
                sent += 2 * row * int(out.any(1).sum() + into.any(1).sum())
                sent += (weight + label) * int(out.sum()) + weight * int(into.sum())
        assert answers[rank]["levels"].get("network", 0) == sent
        assert answers[rank]["reads"] == 1 + (inside > 1) + 1, (
            "between domains, inside of one, of the experts"
        )
    for name, param in experts.named_parameters():
        gradient = torch.cat([answers[rank]["experts"][name] for rank in range(ranks)])
        assert_near(gradient, param.grad)


@pytest.mark.process
@pytest.mark.parametrize(("domains", "inside"), [(2, 3), (3, 2)])
def test_bytes_by_level_are_those_of_the_plan(domains, inside):
    """Tokens make each pair of choices equally often, as the plan assumes: the bytes are exact,
    beside weights and labels."""
    ranks = domains * inside
    tokens = [pair for pair in itertools.combinations(range(6), 2) for _ in range(2)]
    routing = Routing(torch.tensor(tokens), *[torch.full((30, 2), 0.5, dtype=torch.float64)] * 3)

    def on(rank: int) -> dict:
        near = [dist.new_group([*range(d * inside, (d + 1) * inside)]) for d in range(domains)][
            rank // inside
        ]
        across = [dist.new_group([*range(i, ranks, inside)]) for i in range(inside)][rank % inside]
        experts = experts_of(slice(rank, rank + 1))
        traffic = {}
        levels = [
            "nvlink" if peer // inside == rank // inside else "network" for peer in range(ranks)
        ]
        for name in ("direct", "hierarchical"):
            counter = CommCounter()
            to = ExpertDispatch(dist.group.WORLD, None, counter, levels)
            if name == "hierarchical":
                by_domain = ["nvlink" if d == rank // inside else "network" for d in range(domains)]
                to = ExpertDispatch(near, None, counter, ["nvlink"] * inside)
                to = HierarchicalDispatch(across, to, counter, by_domain)
            to(torch.zeros(30, 32, dtype=torch.float64), routing, experts, nothing)
            traffic[name] = dict(counter.levels)
        return traffic

    train = structs.replace(make_plan().job.train, precision="fp64", seq_len=30)
    for rank_traffic in run_ranks(on, ranks):
        for name, sent in rank_traffic.items():
            options = {} if name == "direct" else {"expert_all_to_all": name}
            plan = make_plan(ep=ranks, nodes=domains, model=MODEL, **options)
            path = Fabric(plan.cluster).path(np.arange(ranks)[None], "exchange")
            exchange_phases = phases(path, MODEL, plan.parallel)
            par = structs.replace(plan.parallel, micro_batch_size=1)
            (operation, size, _), *_ = expert_operations(Workload(MODEL, par, train))
            planned = {"nvlink": 0.0, "network": 0.0}
            for phase in exchange_phases:
                for level, share in phase.share.items():
                    planned["nvlink" if level == "nvlink" else "network"] += (
                        2 * share * sent_bytes(operation, size, ranks)
                    )
            away = {
                "nvlink": (inside - 1) / ranks,
                "network": (ranks - inside) / ranks,
            }  # of the copies, by weight
            if name == "hierarchical":
                away["nvlink"] = (inside - 1) / inside
            label = {"nvlink": 0, "network": 4 * (name == "hierarchical")}
            extra = {level: 60 * share * (8 + label[level]) for level, share in away.items()}
            assert sent == pytest.approx(
                {level: planned[level] + extra[level] for level in sent}, rel=1e-12
            )
    assert rank_traffic["hierarchical"]["network"] < rank_traffic["direct"]["network"]


class Order:
    """A trace that keeps the order of what begins and ends."""

    def __init__(self):
        self.seen = []

    def transfer(self, name, axis, size, ranks):
        self.seen.append("start")

    def on_arrival(self, work):
        return lambda: self.seen.append("wait")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["direct", "hierarchical"])
def test_shared_experts_compute_while_tokens_are_on_their_way(kind):
    """The dispatch of rows starts, shared experts compute, then their arrival is waited for; in
    backward the same."""
    moe = structs.replace(MOE, shared_ffn_hidden=16)

    def on(rank: int) -> dict:
        mixture = MixtureOfExperts(small(**LLAMA, moe=moe), moe).double()
        order = Order()
        for param in mixture.parameters():
            torch.nn.init.normal_(param)
        local = Experts(MODEL, structs.replace(MOE, experts=3)).double()
        mixture.experts = local
        counter = CommCounter(trace=order)
        to = ExpertDispatch(dist.group.WORLD, None, counter, ["network"] * 2)
        if kind == "hierarchical":
            to = HierarchicalDispatch(
                dist.group.WORLD, ExpertDispatch(None, None, counter, []), counter, ["network"] * 2
            )
        mixture.dispatch = to
        mixture.shared.register_forward_hook(lambda *_: order.seen.append("shared"))
        mixture.shared.register_full_backward_hook(lambda *_: order.seen.append("shared"))
        local.register_forward_pre_hook(lambda *_: order.seen.append("experts"))
        x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
        out = mixture(x)
        forward = order.seen
        order.seen = []
        out.sum().backward()
        return {"forward": forward, "backward": order.seen}

    on_their_way = {"direct": 2, "hierarchical": 1}[
        kind
    ]  # rows, with their weights where these go the same way
    overlapped = ["start"] * on_their_way + ["shared"] + ["wait"] * on_their_way
    for record in run_ranks(on, 2):
        there = record["forward"][: record["forward"].index("experts")]
        assert there[-len(overlapped) :] == overlapped
        assert "shared" not in there[: -len(overlapped)] and there.count("start") == there.count(
            "wait"
        )
        at = record["backward"].index("shared")
        first = at - on_their_way
        after = at + 1 + on_their_way
        assert record["backward"][first:after] == overlapped
        assert record["backward"][first - 1] == "wait", "the exchange of results is over"


@pytest.mark.process
@pytest.mark.parametrize("case", ["spread", "two experts take all", "a rank without tokens"])
@pytest.mark.parametrize("expert_ranks", [1, 2])
def test_experts_cut_over_tensor_parallel_ranks(case, expert_ranks):
    """2 slices of each expert; ranks (expert, slice) number slices first."""

    def on(rank: int) -> dict:
        over_slices = None
        over_experts = None
        for first in range(expert_ranks):
            group = dist.new_group([2 * first, 2 * first + 1])
            over_slices = group if rank // 2 == first else over_slices
        for first in range(2 if expert_ranks > 1 else 0):
            group = dist.new_group([first, first + 2])
            over_experts = group if rank % 2 == first else over_experts
        expert, slice_number = divmod(rank, 2)
        share = 6 // expert_ranks
        experts = experts_of(
            slice(expert * share, (expert + 1) * share),
            slice(slice_number * 6, slice_number * 6 + 6),
        )
        levels = ["network"] * expert_ranks
        return run(
            case, rank, ExpertDispatch(over_experts, over_slices, CommCounter(), levels), experts
        )

    ranks = 2 * expert_ranks
    answers = run_ranks(on, ranks)
    experts = experts_of(slice(0, 6))
    for rank in range(ranks):
        compare(answers[rank], run(case, rank, dispatch, experts))
    for name, param in experts.named_parameters():
        dim = 2 if name.startswith("down") else 1
        slices = [answers[rank]["experts"][name] for rank in range(ranks)]
        gradient = torch.cat(
            [torch.cat(slices[2 * e : 2 * e + 2], dim=dim) for e in range(expert_ranks)]
        )
        assert_near(gradient, param.grad)
