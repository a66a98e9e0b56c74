"""Data parallelism, ZeRO-1, accumulation, clipping and AdamW together equal one process, to the last digits of fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from orchestrator.plan.document import Optim
from tests.beds.plans import make_plan
from tests.reference import adamw as naive
from tests.trainer.together import run_together, told
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.optim.adamw import ShardedAdamW
from trainer.optim.clip import clip_coefficient, grad_norm
from trainer.parallel.data.buckets import GradBuckets
from trainer.parallel.params import whole
from trainer.precision import FP64, Recipe
from trainer.verify.ranks import run_ranks

OPTIM = Optim(
    **{"lr": 1e-2, "min_lr_ratio": 0.1, "schedule": "constant", "warmup_steps": 0, "decay_steps": 0},
    **{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
)
BF16 = Recipe(torch.bfloat16, torch.float32, torch.float32)
CLIP, STEPS, VOCAB, SEQ = 0.05, 2, 11, 5


def toy(dtype: torch.dtype) -> torch.nn.Sequential:
    """Matrices, biases, norms, and a size that no number of ranks divides."""
    torch.manual_seed(7)
    layers = [torch.nn.Embedding(VOCAB, 13), torch.nn.Linear(13, 37), torch.nn.LayerNorm(37), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(37, VOCAB)).to(dtype)


def sample(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; how many targets count (are not -100) differs from sample to sample, and is sometimes 0."""
    generator = torch.Generator().manual_seed(step * 1000 + index)
    tokens = torch.randint(VOCAB, (SEQ,), generator=generator)
    targets = torch.randint(VOCAB, (SEQ,), generator=generator)
    targets[: (index * 3 + step) % (SEQ + 1)] = -100
    return tokens, targets


def loss_sum(model: torch.nn.Module, step: int, index: int) -> torch.Tensor:
    tokens, targets = sample(step, index)
    return F.cross_entropy(model(tokens), targets, ignore_index=-100, reduction="sum")


def valid_tokens(step: int, samples: int) -> int:
    return sum(int((sample(step, index)[1] != -100).sum()) for index in range(samples))


def one_process(samples: int) -> list[dict]:
    """All samples in one batch, the loss divided by the number of valid tokens, the naive optimizer."""
    model = toy(torch.float64)
    optimizer = naive.AdamW(OPTIM.beta1, OPTIM.beta2, OPTIM.eps, OPTIM.weight_decay)
    record = []
    for step in range(STEPS):
        model.zero_grad()
        loss = sum(loss_sum(model, step, index) for index in range(samples)) / valid_tokens(step, samples)
        loss.backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        weights = {name: param.detach() for name, param in model.named_parameters()}
        new = optimizer.step(weights, naive.clipped(grads, CLIP), OPTIM.lr)
        record.append({"loss": loss.item(), "norm": naive.norm(grads), "grads": grads, "weights": new})
        model = toy(torch.float64)
        model.load_state_dict(new)
    return record


def rank_main(rank: int, plan, recipe: Recipe) -> dict:
    par, mesh, counter = plan.parallel, Mesh.from_plan(plan, rank), CommCounter()
    model = toy(recipe.param)
    triples = [(name, param, whole(name, tuple(param.shape))) for name, param in model.named_parameters()]
    buckets = GradBuckets(triples, mesh, par.zero, recipe.reduce, par.bucket_bytes, counter)
    optimizer = ShardedAdamW(buckets, OPTIM, recipe.master)
    samples = par.micro_batches * par.dp
    started_in_backward: list[int] = []
    model[1].weight.register_hook(lambda _: started_in_backward.append(buckets.launched))
    record = []
    for step in range(STEPS):
        buckets.expect(par.micro_batches)
        total = valid_tokens(step, samples)
        loss = torch.zeros((), dtype=torch.float64)
        for micro in range(par.micro_batches):
            part = loss_sum(model, step, micro * par.dp + mesh.coord.dp) / total
            part.backward()
            loss += part.detach()
        buckets.finish()
        torch.distributed.all_reduce(loss)
        norm = grad_norm(buckets)
        grads = buckets.full_grads()
        optimizer.step(OPTIM.lr, clip_coefficient(norm, CLIP))
        buckets.wait_params()
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        sent, _ = counter.take()
        record.append({"loss": loss.item(), "norm": norm.item(), "grads": grads, "weights": weights, "sent": sent})
    slices = [
        {"name": s.info.name, "kind": s.kind, "start": s.start, "stop": s.stop, "writes": s.writes, "values": s.tensor}
        for s in optimizer.slices()
    ]
    elements = sum(bucket.layout.numel for bucket in buckets.buckets)
    return {"record": record, "slices": slices, "elements": elements, "started": started_in_backward,
            "buckets": len(buckets.buckets), "state": sum(t.numel() for t in optimizer.tensors())}  # fmt: skip


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


CELLS = [
    *((dp, zero, micro, 1 << 20) for dp in (1, 2, 4) for zero in (0, 1) for micro in (1, 4)),
    *((dp, zero, 4, size) for dp in (2, 3) for zero in (0, 1) for size in (1, 3000)),
]


@pytest.mark.process
@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_equals_one_process(dp):
    cases, samples = {}, {}
    for world, zero, micro, bucket_bytes in CELLS:
        if world == dp:
            name = f"zero{zero}, {micro} micro-batches, buckets of {bucket_bytes}"
            plan = make_plan(dp=dp, zero=zero, micro_batches=micro, bucket_bytes=bucket_bytes)
            cases[name], samples[name] = (plan, FP64), dp * micro
    for name, results in run_together(rank_main, dp, cases).items():
        with told(name):
            check(results, one_process(samples[name]))


def check(results: list[dict], truth: list[dict]) -> None:
    for result in results:
        for found, true in zip(result["record"], truth, strict=True):
            assert abs(found["loss"] - true["loss"]) < 1e-12
            assert abs(found["norm"] - true["norm"]) < 1e-12 * true["norm"]
            for name in true["grads"]:
                assert relative(found["grads"][name], true["grads"][name]) < 1e-10, name
                assert relative(found["weights"][name], true["weights"][name]) < 1e-10, name


@pytest.mark.process
@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_follows_an_fp32_master(zero):
    """bf16 weights round away steps smaller than their resolution; the master remembers. The master is the naive
    optimizer's on the gradients that were reduced, the weights are its rounding, and all ranks agree to the bit."""
    plan = make_plan(dp=2, zero=zero, micro_batches=2)
    first, second = run_ranks(rank_main, 2, plan, BF16)
    optimizer = naive.AdamW(OPTIM.beta1, OPTIM.beta2, OPTIM.eps, OPTIM.weight_decay)
    master = {name: param.detach().float() for name, param in toy(torch.bfloat16).named_parameters()}
    for one, other in zip(first["record"], second["record"], strict=True):
        assert {grad.dtype for grad in one["grads"].values()} == {torch.float32}
        master = optimizer.step(master, naive.clipped(one["grads"], CLIP), OPTIM.lr)
        for name, weight in one["weights"].items():
            assert weight.dtype == torch.bfloat16 and torch.equal(weight, other["weights"][name])
    for entry in (*first["slices"], *second["slices"]):
        if entry["kind"] == "master":
            place = slice(entry["start"], entry["stop"])
            torch.testing.assert_close(entry["values"], master[entry["name"]].flatten()[place], rtol=1e-5, atol=1e-7)
            weight = first["record"][-1]["weights"][entry["name"]]
            assert torch.equal(entry["values"].bfloat16(), weight.flatten()[place])


@pytest.mark.process
@pytest.mark.parametrize("zero", [0, 1])
def test_reduction_starts_inside_backward(zero):
    """When the step's last backward reaches the first matrix, the reductions of later layers are under way; in its
    earlier micro-batch none is, and in the first step, which only counts, neither."""
    plan = make_plan(dp=2, zero=zero, micro_batches=2, bucket_bytes=64)
    for result in run_ranks(rank_main, 2, plan, FP64):
        assert result["started"][:3] == [0, 0, 0] and 0 < result["started"][3] < result["buckets"]


@pytest.mark.process
@pytest.mark.parametrize("dp, zero", [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_checkpoint_slices_cover_every_element_once(dp, zero):
    plan = make_plan(dp=dp, zero=zero, bucket_bytes=3000)
    results = run_ranks(rank_main, dp, plan, FP64)
    weights = results[0]["record"][-1]["weights"]
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for name, weight in weights.items():
            written = torch.full((weight.numel(),), float("nan"), dtype=torch.float64)
            for entry in (e for r in results for e in r["slices"] if (e["name"], e["kind"]) == (name, kind)):
                piece = written[entry["start"] : entry["stop"]]
                if entry["writes"]:
                    assert bool(piece.isnan().all())
                    piece.copy_(entry["values"])
            assert not bool(written.isnan().any())
            if kind == "master":
                assert torch.equal(written, weight.flatten())
