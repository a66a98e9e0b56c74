"""Optimizer states on the host: to the bit what the device computes, in every layout, precision and
after a resume."""

from __future__ import annotations

import errno
import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from orchestrator.config.compose import load
from orchestrator.cost.memory.rank_memory import memory_by_pp_rank
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Offload
from orchestrator.plan.offload import BLOCK, buffer_size, chunk_elements
from tests.beds.plans import make_plan, tiny_model
from tests.planner.configs import build_plan
from tests.trainer.samples import GQA, LLAMA, engine_of, small
from tests.trainer.together import run_together, told
from trainer.checkpoint.format import StatePiece
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.errors import DiskError, exit_code
from trainer.host.file import Requests, StateFile
from trainer.host.memory import HostMemory
from trainer.metrics.memory import StepMemory
from trainer.optim import sharded
from trainer.optim.sharded import copy_weights_to_device
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

HOST = Offload(optimizer="host")
#: Through three chunks of 1024 elements.
DISK = Offload(optimizer="disk", buffer_bytes=buffer_size(100_000 * 2, 3, 4))
LAYOUTS = {
    "dp2": {"dp": 2, "bucket_bytes": 1 << 12},
    "zero1": {"dp": 2, "zero": 1, "bucket_bytes": 1 << 12, "precision": "bf16"},
    "zero1 in one bucket": {"dp": 2, "zero": 1, "bucket_bytes": 1 << 25},
    "zero2": {"dp": 2, "zero": 2, "bucket_bytes": 1 << 12, "precision": "fp16"},
    "zero3": {"dp": 2, "zero": 3, "precision": "bf16", "micro_batches": 3},
    "tp2": {"tp": 2, "micro_batches": 3},
    "pp2": {"pp": 2, "micro_batches": 3, "schedule": "zb_h1"},
}


PAGES = structs.replace(DISK, weights=True)
#: Slices of two ranks are whole blocks of 64, and matrices of blocks are equally large.
WIDE = tiny_model(hidden=128, kv_heads=4, head_dim=32, ffn_hidden=128, vocab=256, layers=2)
OPTIMIZERS = {
    "muon": {"optim_kind": "muon"},
    "sgd": {"optim_kind": "sgd"},
    "bf16 state": {"optim_state": "bf16"},
    "8-bit state": {"optim_state": "8bit", "model": WIDE},
}


def plan_of(layout: str, offload: Offload | None, optimizer: str = ""):
    keys = {"model": small(**LLAMA, **GQA, layers=4)} | OPTIMIZERS.get(optimizer, {})
    return make_plan(offload=offload, **(keys | LAYOUTS[layout]))


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        rows = samples_of_step(engine.plan.parallel, engine.mesh.coord, step)
        engine.update(
            engine.gradients([micro_batch(engine.plan, row) for row in rows], 100)[1], 1e-2
        )


def state(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights, and every kind of state of a parameter as this rank holds it, in one piece."""
    engine.buckets.wait_params()
    pieces_by_name: dict[str, list[StatePiece]] = {}
    for piece in engine.state_pieces(to_write=False):
        pieces_by_name.setdefault(f"{piece.kind} {piece.info.name}", []).append(piece)
    tensors = {
        name: torch.cat([shard.data for shard in sorted(pieces, key=lambda shard: shard.offset)])
        for name, pieces in pieces_by_name.items()
    }
    return tensors | {
        f"weight {info.name}": tensor.clone() for info, tensor in engine.buckets.full_params()
    }


def start_rounded(engine: Engine) -> None:
    """Begin with the weights that others begin with, where shards are the master copy and begin
    unrounded."""
    for piece in engine.state_pieces(to_write=False):
        if piece.kind == "master":
            piece.data.copy_(piece.data.to(engine.recipe.param))


def moved(rank: int, layout: str, offload: Offload, optimizer: str = "") -> dict[str, bool]:
    """Three steps on the device, and three offloaded of which the last follows on a copy of the
    state."""
    device, away = (
        engine_of(plan_of(layout, placement, optimizer), rank) for placement in (None, offload)
    )
    if layout == "zero3":
        start_rounded(device)
    train(device, range(2))
    train(away, range(2))
    resumed = engine_of(plan_of(layout, offload, optimizer), rank)
    pieces = {(p.kind, p.info.name, p.offset): p.data for p in away.state_pieces(to_write=False)}
    for piece in resumed.state_pieces(to_write=False):
        piece.data.copy_(pieces[piece.kind, piece.info.name, piece.offset])
    resumed.resumed(2, away.scalars())
    train(device, range(2, 3))
    train(resumed, range(2, 3))
    expected = state(device)
    resumed_state = state(resumed)
    assert expected.keys() == resumed_state.keys()
    equal = {"no state elsewhere": not away.optimizer.tensors()}
    for name, tensor in expected.items():
        equal[name] = torch.equal(
            resumed_state[name], tensor.to(resumed_state[name].dtype)
        )  # shards that are masters are wide
    return equal


@pytest.mark.process
@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        *(
            pytest.param(layout, placement, id=f"{layout} {placement.optimizer}")
            for layout in LAYOUTS
            for placement in (HOST, DISK)
        ),
        *(
            pytest.param(layout, PAGES, id=f"{layout} weights on the disk")
            for layout in ("zero1", "zero2", "pp2")
        ),
    ],
)
def test_weights_and_states_are_those_of_the_device(layout, placement):
    for equal in run_ranks(moved, 2, layout, placement):
        assert len(equal) > 10 and all(equal.values()), [
            name for name, matches in equal.items() if not matches
        ]


@pytest.mark.process
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_other_optimizers_on_the_host_are_those_of_the_device(optimizer):
    cases = {layout: (layout, HOST, optimizer) for layout in LAYOUTS}
    for layout, answers in run_together(moved, 2, cases).items():
        with told(layout):
            for equal in answers:
                assert len(equal) > 10 and all(equal.values()), [
                    name for name, matches in equal.items() if not matches
                ]


def kept_on_the_host(rank: int, layout: dict) -> dict[str, int]:
    plan = make_plan(offload=HOST, **({"model": WIDE} | layout))
    engine = engine_of(plan, rank)
    train(engine, range(1))
    recipe = recipe_of("orch", plan.job.optim)
    account = memory_by_pp_rank(Workload.of_plan(plan), plan.cluster, recipe)[engine.mesh.coord.pp]
    return {
        "kept": sum(tensor.nbytes for tensor in engine.host.tensors),
        "planned": account.host,
        "on the device": sum(tensor.nbytes for tensor in engine.optimizer.tensors()),
    }


@pytest.mark.process
def test_other_optimizers_take_the_planned_bytes_of_the_host():
    layouts = {
        "dp2": {"dp": 2},
        "zero1": {"dp": 2, "zero": 1, "precision": "bf16"},
        "zero2": {"dp": 2, "zero": 2},
        "zero3": {"dp": 2, "zero": 3, "precision": "bf16"},
        "pp2": {"pp": 2},
    }
    cases = {
        f"{optimizer}, {name}": (layout | {"bucket_bytes": 1 << 22} | keys,)
        for optimizer, keys in OPTIMIZERS.items()
        for name, layout in layouts.items()
    }
    for name, answers in run_together(kept_on_the_host, 2, cases).items():
        with told(name):
            for answer in answers:
                assert answer["kept"] == answer["planned"] > 0 == answer["on the device"]


def on_the_device(rank: int, placement: Offload) -> tuple[int, int, list[str]]:
    """Bytes and elements of the shards of ZeRO-3, and what their gradients are."""
    engine = engine_of(plan_of("zero3", placement), rank)
    train(engine, range(1))
    shards = engine.buckets.param_tensors()
    gradients = sorted({str(tensor.dtype) for tensor in engine.buckets.grad_tensors()})
    return sum(shard.nbytes for shard in shards), sum(shard.numel() for shard in shards), gradients


@pytest.mark.process
@pytest.mark.parametrize("placement", [HOST, DISK], ids=["host", "disk"])
def test_shards_are_as_narrow_as_what_computes_and_their_gradients_are_not(placement):
    """The master weights are elsewhere, so nobody reads more digits on the device."""
    for size, elements, gradients in run_ranks(on_the_device, 2, placement):
        assert size == 2 * elements > 0 and gradients == ["torch.float32"]


def streamed(rank: int) -> list[int]:
    """How many buckets were on their way to the host when the reduction of each began, in the
    second step."""
    engine = engine_of(plan_of("zero1", HOST), rank)
    train(engine, range(1))
    buckets = engine.buckets
    counts = list[int]()
    launch = buckets._start_reduction

    def counting() -> None:
        launch()
        counts.append(sum(bucket.copies_to_host for bucket in buckets.buckets))

    buckets._start_reduction = counting
    train(engine, range(1, 2))
    return counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_go_back_through_the_memory_of_the_gradient(dtype):
    """Narrow ones: it is page-locked, so their copy runs beside the next update. Wide ones need no
    room."""
    master = torch.arange(8.0) / 7
    gradient = torch.full((8,), -1.0)
    bucket = SimpleNamespace(param_shard=torch.zeros(8, dtype=dtype), host_grad=gradient)
    copy_weights_to_device(bucket, master)
    assert torch.equal(bucket.param_shard, master.to(dtype))
    room = gradient.view(torch.uint8)[: bucket.param_shard.nbytes].view(dtype)
    assert torch.equal(room, bucket.param_shard) == (dtype == torch.bfloat16)
    assert dtype == torch.bfloat16 or bool((gradient == -1.0).all())


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_a_narrow_gradient_in_pieces_is_the_whole_one(monkeypatch, factor):
    """The two are equal to the bit, and the last piece is shorter."""
    monkeypatch.setattr(sharded, "WIDENED_ELEMENTS", 1 << 10)
    gradient = torch.randn(5000).bfloat16()
    weights = torch.randn(5000)
    kind = SimpleNamespace(whole_matrix=False, decay=True, narrow=False)
    rules = sharded.rules_of(plan_of("dp2", None).job.optim)
    variants = []
    for host in (None, HostMemory(torch.device("cpu"))):
        bucket = SimpleNamespace(param_shard=weights.clone(), grad_shard=gradient, kind=kind)
        optimizer = sharded.ShardedOptimizer(
            SimpleNamespace(buckets=[bucket], zero=1, gathers=False), rules, torch.float32, host
        )
        for _ in range(3):
            scale, update = optimizer.decide(1e-2, torch.tensor(factor), torch.tensor(True))
            optimizer.compute([0], [gradient], scale, update)
        variants.append([optimizer.states[0].master, *optimizer.states[0].state.values()])
    assert all(
        torch.equal(device_tensor, host_tensor)
        for device_tensor, host_tensor in zip(*variants, strict=True)
    )


def test_large_arrays_of_the_host_do_not_lie_in_line():
    """Their distance is no multiple of a power of two that caches count in."""
    host = HostMemory(torch.device("cpu"))
    starts = [host.zeros(1 << 20, torch.float32).data_ptr() for _ in range(4)]
    for start, second_start in itertools.combinations(starts, 2):
        assert 8192 <= (start - second_start) % (1 << 20) <= (1 << 20) - 8192
    assert all(
        tensor.nbytes == tensor.untyped_storage().nbytes() == 4 << 20 for tensor in host.tensors
    )


@pytest.mark.process
def test_gradients_leave_bucket_by_bucket_during_backward():
    for counts in run_ranks(streamed, 2):
        assert len(counts) > 3 and counts == sorted(counts) and counts[-1] > len(counts) // 2


def categories(rank: int) -> dict[str, int]:
    engine = engine_of(plan_of("zero2", HOST), rank)
    memory = StepMemory.of_engine(engine)
    peak = dict[str, int]()
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
    with pytest.raises(MemoryError, match="GiB of host memory for the offloaded state") as error:
        HostMemory(torch.device("cpu")).zeros(1 << 60, torch.float32)
    assert "\n" not in str(error.value)


def disk_run(rank: int) -> dict[str, int]:
    engine = engine_of(plan_of("zero1", DISK), rank)
    optimizer = engine.optimizer
    memory = StepMemory.of_engine(engine)
    peak = dict[str, int]()
    with memory.measure(peak):
        train(engine, range(1))
    padding = sum(chunk.stride * 3 - (chunk.stop - chunk.start) * 12 for chunk in optimizer.chunks)
    numel = sum(bucket.param_shard.numel() for bucket in engine.buckets.buckets)
    return {
        "host": peak["host"],
        "disk": optimizer.bytes - padding,
        "state": 12 * numel,
        "chunks": len(optimizer.chunks),
    }


@pytest.mark.process
def test_memory_of_the_host_is_what_was_asked_for_whatever_the_model():
    for answer in run_ranks(disk_run, 2):
        assert answer["host"] == buffer_size(DISK.buffer_bytes, 3, 4) <= DISK.buffer_bytes
        assert answer["disk"] == answer["state"]
        assert answer["chunks"] > len(LAYOUTS)


def test_a_buffer_is_whole_blocks_and_too_small_ones_hold_none():
    for size in (0, 1, 50_000, 100_000, 1 << 20, 1 << 28):
        chunk = chunk_elements(size, 3, 4)
        assert chunk * 4 % BLOCK == 0 and buffer_size(size, 3, 4) <= max(size, 6 * BLOCK)
    assert chunk_elements(6 * BLOCK, 3, 4) == 0 < chunk_elements(6 * BLOCK + 14 * BLOCK, 3, 4)


def aligned_block() -> torch.Tensor:
    room = torch.zeros(2 * BLOCK, dtype=torch.uint8)
    start = -room.data_ptr() % BLOCK
    return room[start : start + BLOCK]


FAILURES = {
    errno.ENOSPC: (Exit.USER, "disk_full"),
    errno.EDQUOT: (Exit.USER, "disk_full"),
    errno.EIO: (Exit.NODE, ""),
    errno.EROFS: (Exit.CONFIG, ""),
}


@pytest.mark.parametrize("number", FAILURES)
@pytest.mark.parametrize("call", ["posix_fallocate", "preadv", "pwritev"])
def test_a_disk_that_fails_ends_with_one_line_and_its_code(tmp_path, monkeypatch, number, call):
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    data = aligned_block()
    with pytest.raises(DiskError) as error:
        monkeypatch.setattr(os, call, fail)
        file = StateFile(tmp_path, BLOCK, Requests())
        file.write(data, 0)
        file.read(data, 0)
    message = str(error.value)
    assert str(tmp_path) in message and os.strerror(number) in message and "\n" not in message
    assert (exit_code(error.value), error.value.cause) == FAILURES[number]
    assert not list(tmp_path.iterdir())


def test_a_missing_disk_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"train.offload_dir .*file cannot hold") as error:
        StateFile(tmp_path / "file", BLOCK, Requests())
    assert exit_code(error.value) == Exit.CONFIG


def test_a_state_file_has_no_name_and_holds_what_was_written(tmp_path):
    file = StateFile(tmp_path, 4 * BLOCK, Requests())
    assert not list(tmp_path.iterdir())
    block = aligned_block()
    block.copy_(torch.arange(BLOCK) % 251)
    file.write(block, 2 * BLOCK)
    mapped = file.mapped()
    assert torch.equal(mapped[2 * BLOCK : 3 * BLOCK], block)
    mapped[2 * BLOCK] = 77  # as a checkpoint is loaded
    del mapped
    file.read(block, 2 * BLOCK)
    assert block[0] == 77
    file.close()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["train.offload=disk", "checkpoint.memory_every_steps=2"],
            "checkpoint.memory_every_steps=0",
        ),
        (["train.offload=disk", "train.offload_buffer_mib=0.01"], "too small: at least 0.1"),
        (["train.offload_weights=true"], "train.offload=host or train.offload=disk"),
        (["train.offload=host", "train.offload_dir=/x"], "is the folder of train.offload=disk"),
    ],
)
def test_what_cannot_be_met_is_refused_at_plan_time(overrides, line):
    with pytest.raises(OrchError, match=line) as error:
        build_plan(load(["cluster=h100x8", "parallel=dp8", *overrides]))
    assert error.value.exit == Exit.CONFIG and "\n" not in error.value.message
