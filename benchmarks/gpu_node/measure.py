"""What one rank of a case does for ours or for a rival, on the same samples.

Each side has its own processes: what a rival does cannot take ours along. It makes warm-up steps
(the first compiles), then rounds; a round ends when the device has finished and all ranks have met.
The best large matrix product is measured before each side, on all GPUs at once: they share power and
heat as in training.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.card import device_name, matmul_ceiling, memory_ceiling
from benchmarks.vs_torch.common import LR
from orchestrator.plan import Plan
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.batch import MicroBatch
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.ranks import join_gloo, join_gpus
from trainer.verify.samples import micro_batch

WARM_UP = 3
GIB = 1 << 30
Step = Callable[[], Tensor]
#: Sides of square products, bytes of an array and of collectives: of a dry run, of GPUs.
PRODUCTS = {True: (128,), False: (4096, 8192, 16384)}
ARRAY = {True: 1 << 16, False: 1 << 30}
MESSAGES = {True: (1 << 12,), False: (1 << 20, 1 << 24, 1 << 28, 1 << 30)}


def join_of(plan: Plan) -> Callable[..., None]:
    """How the ranks of a plan join their group."""
    if plan.cluster.device == "cpu":
        return join_gloo

    def join(**rendezvous: Any) -> None:
        apply_settings(plan)
        join_gpus(**rendezvous)

    return join


def device_of(rank: int, plan: Plan) -> torch.device:
    return torch.device("cpu") if plan.cluster.device == "cpu" else torch.device("cuda", rank)


def run_side(
    rank: int, plan: Plan, rival: Callable[..., Step] | None, rounds: int, dry: bool
) -> dict[str, Any]:
    """What ours (`rival` None) or a rival takes. An error ends all ranks: the peers of one that has
    failed wait for it inside NCCL, where nobody can ask them."""
    device = device_of(rank, plan)
    batches = batches_of(plan, rank, device)
    facts: dict[str, Any] = {
        "name": device_name(device),
        "ceiling_flops": matmul_ceiling(device, PRODUCTS[dry]),
    }
    if rival is None:
        step = ours(plan, rank, device, batches, facts)
    else:
        step = rival(plan, device, batches)
    return facts | timed(step, device, rounds)


def batches_of(plan: Plan, rank: int, device: torch.device) -> list[MicroBatch]:
    """The micro-batches that this rank's replica computes in every step."""
    indices = samples_of_step(plan.parallel, plan.ranks[rank].coord, 0)
    packed = plan.job.data.isolate_documents
    return [micro_batch(plan, one, packed).to(device) for one in indices]


def ours(
    plan: Plan, rank: int, device: torch.device, batches: list[MicroBatch], facts: dict[str, Any]
) -> Step:
    engine = Engine(plan, Mesh.from_plan(plan, rank), device, recipe(plan.job.train))
    valid = plan.parallel.global_batch_tokens
    passed = 0

    def step() -> Tensor:
        nonlocal passed
        engine.measure(passed == WARM_UP - 1)  # one step with events; the measured ones have none
        loss, norm = engine.gradients(batches, valid)
        engine.update(norm, LR)
        engine.buckets.wait_params()
        passed += 1
        if passed == WARM_UP:
            _finished(device)
            account = engine.counter.close()
            facts.update(exposed_s=account.seconds(), bytes=account.bytes)
            facts["idle_s"] = engine.pipeline.action_times.step.idle_seconds()
        elif passed < WARM_UP:
            engine.counter.close()
        return loss

    return step


def timed(step: Step, device: torch.device, rounds: int) -> dict[str, Any]:
    """Seconds of the rounds, and the memory at their peak."""
    for _ in range(WARM_UP):
        loss = step()
    _finished(device)
    spent = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        loss = step()
        _finished(device)
        dist.barrier()
        spent.append(time.perf_counter() - begin)
    cuda = device.type == "cuda"
    return {
        "step_s": statistics.median(spent),
        "fastest_s": min(spent),
        "slowest_s": max(spent),
        "loss": float(loss),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if cuda else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if cuda else 0.0,
    }


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -------------------------------------------------------------------------------------------
#     ceilings of the node


def ceilings(rank: int, plan: Plan, dry: bool) -> dict[str, Any]:
    """What each GPU can do while all do it: products, and its own memory."""
    device = device_of(rank, plan)
    product = matmul_ceiling(device, PRODUCTS[dry])
    return {
        "matmul_flops": product,
        **memory_ceiling(device, ARRAY[dry]),
        "cores": os.cpu_count(),
    }


def nccl(rank: int, plan: Plan, dry: bool) -> dict[str, Any]:
    """{"nccl": {operation: {bytes: bus bytes/s}}} of all GPUs at once. Bus rates are those of
    NCCL's tests: bytes over a ring's slowest link."""
    device = device_of(rank, plan)
    world = dist.get_world_size()
    found: dict[str, dict[str, float]] = {}
    for size in MESSAGES[dry]:
        whole = torch.zeros(size // 2 // world * world, device=device, dtype=torch.bfloat16)
        part = whole[: whole.numel() // world].clone()
        other = torch.empty_like(whole)
        runs: dict[str, tuple[Callable[[], object], float]] = {
            "all-reduce": (lambda x=whole: dist.all_reduce(x), 2 * (world - 1) / world),
            "all-gather": (
                lambda x=whole, y=part: dist.all_gather_into_tensor(x, y),
                (world - 1) / world,
            ),
            "all-to-all": (
                lambda x=whole, y=other: dist.all_to_all_single(y, x),
                (world - 1) / world,
            ),
            "send and receive": (lambda x=whole, y=other: _neighbours(x, y, rank, world), 1.0),
        }
        if device.type == "cuda":  # gloo has none
            scatter = (
                lambda x=whole, y=part: dist.reduce_scatter_tensor(y, x),
                (world - 1) / world,
            )
            runs["reduce-scatter"] = scatter
        for name, (run, share) in runs.items():
            found.setdefault(name, {})[str(size)] = share * whole.nbytes / _best(run, device)
    return {"nccl": found}


def _neighbours(x: Tensor, y: Tensor, rank: int, world: int) -> None:
    """Each rank sends to the next one and receives from the one before."""
    sends = (
        dist.P2POp(dist.isend, x, (rank + 1) % world),
        dist.P2POp(dist.irecv, y, (rank - 1) % world),
    )
    for work in dist.batch_isend_irecv(list(sends)):
        work.wait()


def _best(run: Callable[[], object], device: torch.device) -> float:
    spent = []
    for _ in range(8):
        dist.barrier()
        begin = time.perf_counter()
        run()
        _finished(device)
        spent.append(time.perf_counter() - begin)
    return min(spent)
