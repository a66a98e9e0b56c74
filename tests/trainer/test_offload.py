"""Optimizer states on the host: to the bit what the device computes, in every layout, precision and after a resume."""

from __future__ import annotations

import pytest
import torch

from orchestrator.plan.document import Offload
from tests.beds.plans import make_plan
from tests.trainer.samples import GQA, LLAMA, engine_of, small
from trainer.checkpoint.format import StatePiece
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.host import HostMemory
from trainer.metrics.memory import StepMemory
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

HOST = Offload(optimizer="host")
LAYOUTS = {
    "dp2": {"dp": 2, "bucket_bytes": 1 << 12},
    "zero1": {"dp": 2, "zero": 1, "bucket_bytes": 1 << 12, "precision": "bf16"},
    "zero1 in one bucket": {"dp": 2, "zero": 1, "bucket_bytes": 1 << 25},
    "zero2": {"dp": 2, "zero": 2, "bucket_bytes": 1 << 12, "precision": "fp16"},
    "zero3": {"dp": 2, "zero": 3, "precision": "bf16"},
    "tp2": {"tp": 2, "micro_batches": 3},
    "pp2": {"pp": 2, "micro_batches": 3, "schedule": "zb_h1"},
}


def plan_of(layout: str, offload: Offload | None):
    return make_plan(model=small(**LLAMA, **GQA, layers=4), offload=offload, **LAYOUTS[layout])


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        rows = samples_of_step(engine.plan.parallel, engine.mesh.coord, step)
        engine.update(engine.gradients([micro_batch(engine.plan, row) for row in rows], 100)[1], 1e-2)


def state(engine: Engine) -> dict[str, torch.Tensor]:
    engine.buckets.wait_params()
    found = {f"{piece.kind} {piece.info.name} {piece.offset}": piece.data.clone() for piece in engine.pieces(own=False)}
    return found | {f"weight {info.name}": whole.clone() for info, whole in engine.buckets.full_params()}


def moved(rank: int, layout: str) -> dict[str, bool]:
    """Three steps on the device, and three of which the first two are offloaded, in two engines."""
    device, host = (engine_of(plan_of(layout, way), rank) for way in (None, HOST))
    train(device, range(2))
    train(host, range(2))
    resumed = engine_of(plan_of(layout, HOST), rank)
    pieces = {(p.kind, p.info.name, p.offset): p.data for p in host.pieces(own=False)}
    for piece in resumed.pieces(own=False):
        fill(piece, pieces)
    resumed.resumed(2, host.scalars())
    train(device, range(2, 3))
    train(resumed, range(2, 3))
    expected, found = state(device), state(resumed)
    assert expected.keys() == found.keys()
    where = [tensor.device.type for tensor in host.optimizer.tensors()]
    return {name: torch.equal(found[name], expected[name]) for name in expected} | {"no state elsewhere": not where}


def fill(piece: StatePiece, pieces: dict) -> None:
    piece.data.copy_(pieces[piece.kind, piece.info.name, piece.offset])


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_states_are_those_of_the_device(layout):
    for equal in run_ranks(moved, 2, layout):
        assert len(equal) > 10 and all(equal.values()), [name for name, same in equal.items() if not same]


def streamed(rank: int) -> list[int]:
    """How many buckets were on their way to the host when the reduction of each began, in the second step."""
    engine = engine_of(plan_of("zero1", HOST), rank)
    train(engine, range(1))
    buckets, counts = engine.buckets, list[int]()
    launch = buckets._launch

    def counting() -> None:
        launch()
        counts.append(sum(bucket.taken for bucket in buckets.buckets))

    buckets._launch = counting
    train(engine, range(1, 2))
    return counts


@pytest.mark.process
def test_gradients_leave_bucket_by_bucket_during_backward():
    for counts in run_ranks(streamed, 2):
        assert len(counts) > 3 and counts == sorted(counts) and counts[-1] > len(counts) // 2


def categories(rank: int) -> dict[str, int]:
    engine = engine_of(plan_of("zero2", HOST), rank)
    memory, peak = StepMemory.of_engine(engine), dict[str, int]()
    with memory.measure(peak):
        train(engine, range(1))
    return peak | {"all": sum(tensor.nbytes for tensor in engine.host.tensors)}


@pytest.mark.process
def test_the_tracker_counts_the_host_apart():
    for peak in run_ranks(categories, 2):
        assert peak["host"] == peak["all"] > 0
        assert peak["optimizer"] == 0
        device = ("params", "grads", "optimizer", "activations", "buffers")
        assert peak["total"] == sum(peak[name] for name in device)


def test_no_host_memory_is_one_line():
    with pytest.raises(MemoryError, match="GiB of host memory for what is offloaded") as error:
        HostMemory(torch.device("cpu")).zeros(1 << 60, torch.float32)
    assert "\n" not in str(error.value)
