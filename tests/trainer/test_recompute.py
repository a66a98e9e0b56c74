"""Recomputation changes memory and work, never a gradient."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.beds.plans import make_plan
from tests.trainer.samples import GPT, GQA, LLAMA, batch, small
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.metrics.memory import StorageTracker
from trainer.parallel import tensor_regions
from trainer.parallel.apply import build
from trainer.parallel.recompute import apply_recompute
from trainer.verify.ranks import run_ranks

B = 2
S = 16
MODES = ("none", "selective", "full")


def run(plan, mesh, mode: str, dtype=torch.float64) -> dict:
    model_part = build(plan, mesh, CommCounter(), dtype=dtype)
    (stage,) = model_part.stages
    apply_recompute(stage, msgspec.structs.replace(plan.job.train, recompute=mode))
    names = [name for name, _, _ in model_part.parameters()]
    data = batch(plan.model, B, S, 0, True)
    with StorageTracker() as tracker:
        loss = model_part.loss(stage(None, data), data.targets)
        kept_bytes = min(live_soon(tracker) for _ in range(20))
    with FlopCounterMode(display=False) as flops:
        loss.backward()
    grads = {name: param.grad for name, param, _ in model_part.parameters()}
    products = sum(
        count
        for op, count in flops.get_flop_counts()["Global"].items()
        if str(op) in ("aten.mm", "aten.addmm")
    )
    return {
        "loss": loss.item(),
        "grads": grads,
        "kept": kept_bytes,
        "products": products,
        "names": names,
    }


def live_soon(tracker: StorageTracker) -> int:
    """Bytes that live a moment later: gloo's thread lets go of the last message's tensors when it
    comes to it."""
    time.sleep(0.002)
    return tracker.live


@pytest.mark.parametrize("kind", [LLAMA, GPT], ids=["llama", "gpt"])
def test_one_rank(kind):
    plan = make_plan(model=small(**kind, **GQA), micro_batch_size=B, seq_len=S)
    plain, selective, full = (run(plan, Mesh.alone(plan), mode) for mode in MODES)
    for recomputed in (selective, full):
        assert recomputed["loss"] == plain["loss"]
        assert recomputed["names"] == plain["names"]
        assert all(
            torch.equal(recomputed["grads"][name], grad) for name, grad in plain["grads"].items()
        )
    assert full["kept"] < selective["kept"] < plain["kept"]
    assert selective["products"] == plain["products"] < full["products"]


@pytest.mark.process
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
def test_tensor_parallel(sp):
    """Without sequence parallelism a partial sum is reduced in place: what was kept must not be
    that tensor."""
    plan = make_plan(model=small(**LLAMA, **GQA), tp=2, sp=sp, micro_batch_size=B, seq_len=S)
    results = run_ranks(
        lambda rank: [run(plan, Mesh.from_plan(plan, rank), mode) for mode in MODES], 2
    )
    for plain, selective, full in results:
        for recomputed in (selective, full):
            assert recomputed["loss"] == plain["loss"]
            assert all(
                torch.equal(recomputed["grads"][name], grad)
                for name, grad in plain["grads"].items()
            )
        assert full["kept"] < selective["kept"] < plain["kept"]


def test_unknown_mode_is_refused():
    plan = make_plan(model=small(**LLAMA, **GQA), micro_batch_size=B, seq_len=S)
    model_part = build(plan, Mesh.alone(plan), CommCounter())
    with pytest.raises(ValueError, match="legal: none, selective, full"):
        apply_recompute(
            model_part.stages[0], msgspec.structs.replace(plan.job.train, recompute="some")
        )


@pytest.mark.process
def test_sequence_parallel_inputs_are_not_kept_whole():
    """A rank holds its part of the sequence of each block's two inputs and the head's, the other
    ranks theirs."""
    plan = make_plan(model=small(**LLAMA, **GQA), tp=2, micro_batch_size=B, seq_len=S)

    def work(rank):
        again = run(plan, Mesh.from_plan(plan, rank), "none")
        original = tensor_regions.OverlappedColumnLinears
        tensor_regions.OverlappedColumnLinears = lambda group, counter, sp, keep=False, pieces=1: (
            original(group, counter, sp, keep=True)
        )
        unsharded = run(plan, Mesh.from_plan(plan, rank), "none")
        return {
            "saved": unsharded["kept"] - again["kept"],
            "same": again["loss"] == unsharded["loss"],
        }

    for answer in run_ranks(work, 2):
        inputs = 2 * plan.model.layers + 1
        # the norms' outputs, which the gathering reads, are held instead of the gathered
        assert answer == {"saved": inputs * B * S * plan.model.hidden * 8 // 2, "same": True}
