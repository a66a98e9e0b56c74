"""Gradients that travel in 16 bits and are summed in fp32 (`train.grad_wire`)."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from msgspec import UNSET

from orchestrator.cost.memory.rank_memory import wire_buffers
from orchestrator.cost.workload import Workload
from orchestrator.plan import Plan
from tests.beds.plans import make_plan
from tests.trainer.samples import GQA, LLAMA, engine_of, small
from tests.trainer.together import run_together, told
from trainer.comm import narrow_wire
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.comm.narrow_wire import start_shard_sum
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

RANKS = 8
SLICE = 500
ROUNDING = 2.0**-8  # of a value in bf16, at most


def addends(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(RANKS * SLICE, generator=generator)


def sums(rank: int) -> dict:
    """This rank's slice of the sum of all addends, of numbers that a narrow sum loses, and what
    this rank sent."""
    group = dist.group.WORLD
    counter = CommCounter()
    narrow = start_shard_sum(addends(rank), group, counter, torch.bfloat16)
    total = narrow.wait()
    sent = counter.bytes["dp"]
    lost = torch.full((RANKS,), 1.0 if rank else 256.0)
    narrow = start_shard_sum(lost, group, counter, torch.bfloat16)
    return {"total": total, "sent": sent, "kept": narrow.wait()}


@pytest.mark.process
def test_a_sum_over_eight_ranks_has_one_rounding_of_each_addend():
    every = torch.stack([addends(rank) for rank in range(RANKS)])
    answers = run_ranks(sums, RANKS)
    total = torch.cat([answer["total"] for answer in answers]).double()
    rounded = every.bfloat16().double().sum(0)
    torch.testing.assert_close(total, rounded, rtol=0, atol=1e-5)
    bound = every.abs().double().sum(0) * ROUNDING + 1e-5
    assert bool(((total - every.double().sum(0)).abs() <= bound).all())
    for answer in answers:
        assert answer["sent"] == RANKS * SLICE * 2 * (RANKS - 1) // RANKS
        assert answer["kept"].dtype == torch.float32 and answer["kept"].item() == 256 + 7


LAYOUTS = {
    "zero1": {"zero": 1},
    "zero1, several buckets": {"zero": 1, "bucket_bytes": 1 << 12},
    "zero1 hybrid, bf16": {"zero": 1, "zero_group": 2, "precision": "bf16"},
    "zero2, several buckets": {"zero": 2, "bucket_bytes": 1 << 12},
    "zero2 hybrid, fp16": {
        "zero": 2,
        "zero_group": 2,
        "precision": "fp16",
        "grad_wire": "fp16",
    },
}


def plan_of(**layout) -> Plan:
    layout = {"grad_wire": "bf16", "micro_batches": 3} | layout
    return make_plan(model=small(**LLAMA, **GQA), **layout)


def gradients(rank: int, layout: dict) -> dict:
    """The gradients of a layout of four ranks, those of this rank alone that travel, and the most
    bytes on their way at a time against the planned ones."""
    engine = engine_of(plan_of(dp=4, **layout), rank)
    rows = samples_of_step(engine.plan.parallel, engine.mesh.coord, 0)
    batches = [micro_batch(engine.plan, row) for row in rows]
    travelling = Travelling()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_wire, "_Arrivals", travelling.arrivals)
        engine.gradients(batches, 100)
    own_plan = plan_of(**{key: layout[key] for key in layout.keys() & {"precision", "grad_wire"}})
    alone = Engine(own_plan, Mesh.alone(own_plan), torch.device("cpu"), engine.recipe)
    assert alone.recipe.wire is not None and alone.recipe.reduce == torch.float32
    shares = [batches] if layout["zero"] == 1 else [[batch] for batch in batches]
    sent = []
    for share in shares:
        alone.gradients(share, 100)
        sent.append(alone.buckets.full_grads())
    numels = [bucket.layout.numel for bucket in engine.buckets.buckets]
    return {
        "got": engine.buckets.full_grads(),
        "sent": sent,
        "most": travelling.most,
        "planned": wire_buffers(Workload.of_plan(engine.plan)),
        "largest": 2 * 2 * max(numels),
    }


class Travelling:
    """Counts the bytes of narrow gradients that are held at a time."""

    def __init__(self) -> None:
        self.held = 0
        self.most = 0
        self.kind = narrow_wire._Arrivals

    def arrivals(self, *args: object) -> object:
        arrivals = self.kind(*args)
        size = arrivals.sent.nbytes + arrivals.arrived.nbytes
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(arrivals, self.free, size)
        return arrivals

    def free(self, size: int) -> None:
        self.held -= size


@pytest.mark.process
def test_gradients_are_the_wide_sum_of_what_each_rank_rounds_once():
    for name, answers in run_together(
        gradients, 4, {name: (layout,) for name, layout in LAYOUTS.items()}
    ).items():
        wire = torch.float16 if "fp16" in name else torch.bfloat16
        with told(name):
            for key, got in answers[0]["got"].items():
                every = torch.stack([sent[key] for answer in answers for sent in answer["sent"]])
                expected = every.to(wire).double().sum(0)
                # A micro-batch's gradient in fp16 is not rounded again.
                is_rounded = bool((every.double().sum(0) != expected).any())
                assert is_rounded == ("fp16" not in name)
                scale = float(expected.abs().max())
                torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-6 * scale)
            for answer in answers:
                buckets = 2 if "zero1" in name else 3
                assert 0 < answer["most"] <= buckets * answer["largest"]
                if "several" not in name:  # buckets are as large as planned, but padded
                    assert answer["most"] <= 1.1 * answer["planned"]


def test_one_rank_sends_nothing_and_rounds_nothing():
    plan = plan_of(zero=1)
    engines = [
        Engine(each, Mesh.alone(each), torch.device("cpu"), recipe(each.job.train))
        for each in (plan, plan_of(zero=1, grad_wire=UNSET))
    ]
    grads = []
    for engine in engines:
        rows = samples_of_step(plan.parallel, engine.mesh.coord, 0)
        engine.gradients([micro_batch(plan, row) for row in rows], 100)
        grads.append(engine.buckets.full_grads())
    for name, tensor in grads[0].items():
        assert torch.equal(tensor, grads[1][name])
