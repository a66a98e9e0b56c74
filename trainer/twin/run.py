"""Runs two steps of one rank of a plan under fake tensors and a fake process group, with the code
that trains.

Shapes, dtypes, storages, autograd and the pipeline's schedule are real; values are not, and kernels
and transfers do nothing. Tensors report a CPU as their device. The twin does what the trainer does
differently on a GPU: it calls NCCL's collectives instead of those made for gloo, and receives start
when the schedule says.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.batch import replica_of, taken
from orchestrator.plan.document import Coord
from orchestrator.plan.twin import RankRun, Transfer
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.compat import fake_tensors, fake_world
from trainer.data.batch import MicroBatch
from trainer.engine import Engine
from trainer.metrics.memory import CATEGORIES, StepMemory
from trainer.model.documents import Documents
from trainer.model.dropout import draws
from trainer.model.experts import Experts
from trainer.precision import recipe

from .choices import choose_evenly
from .numbers import Numbers


def run_rank(plan: Plan, rank: int) -> RankRun:
    """Runs two steps of `rank` alone in this process, and returns the second. Raises LayoutError
    for a plan that the trainer does not run."""
    with fake_rank(plan, rank):
        engine = fake_engine(plan, rank)
        memory = StepMemory.of_engine(engine)
        # The first step learns how many gradients each parameter gets, so its reductions start
        # late.
        run_step(engine, memory, fake_batches(plan, engine.mesh.coord))
        return run_step(engine, memory, fake_batches(plan, engine.mesh.coord))


@contextlib.contextmanager
def fake_rank(plan: Plan, rank: int) -> Iterator[None]:
    """Context manager in which this process is `rank` of a plan, alone and without values."""
    with fake_world(rank, plan.parallel.world_size), fake_tensors(), Numbers():
        yield


def fake_engine(plan: Plan, rank: int) -> Engine:
    """Returns the engine of a rank, as on the plan's device, inside `fake_rank`. Raises LayoutError
    for a plan that the trainer does not run."""
    # Compiled blocks do not run under fake tensors. They may keep other tensors (docs/twin.md).
    train = structs.replace(plan.job.train, compile=False)
    plan = structs.replace(plan, job=structs.replace(plan.job, train=train))
    gpu = plan.cluster.device == "cuda"
    engine = Engine(
        plan,
        Mesh.from_plan(plan, rank),
        torch.device("cpu"),
        recipe(plan.job.train),
        CommCounter(gloo=not gpu),
    )
    for stage in engine.part.stages:
        choose_evenly(stage)
        for module in stage.modules():
            if isinstance(module, Experts):
                module.in_one_kernel = gpu
    return engine


def run_step(engine: Engine, memory: StepMemory, batches: Sequence[MicroBatch]) -> RankRun:
    """Runs one step of an engine, fake or real, and returns its transfers and its memory."""
    began = perf_counter()
    recorder = Recorder()
    peak = dict[str, int]()
    engine.counter.trace = recorder
    engine.pipeline.one_by_one = True  # memory and fake tensors follow one thread
    with memory.measure(peak):
        _, norm = engine.gradients(batches, engine.plan.parallel.global_batch_tokens)
        float(norm)
        engine.update(norm, engine.plan.job.optim.lr)
    engine.counter.trace = None
    points = memory.points()
    held = {name: points[0].held[name] for name in CATEGORIES[:3]}
    held["activations"] = max(point.held["activations"] for point in points)
    return RankRun(
        rank=engine.mesh.rank,
        micro_batches=len(batches),
        transfers=[
            Transfer(
                operation=operation,
                axis=axis,
                bytes=size,
                ranks=list(ranks),
            )
            for operation, axis, size, ranks in recorder.kinds
        ],
        sequence=recorder.sequence,
        memory=held,
        peak=peak,
        seconds=perf_counter() - began,
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def fake_batches(plan: Plan, coord: Coord) -> list[MicroBatch]:
    """Returns the micro-batches that the loader would give this rank for a step, without values."""
    par = plan.parallel
    shape = par.micro_batch_size, plan.job.train.seq_len

    def column() -> Tensor:
        return torch.empty(shape, dtype=torch.int64)

    def batch() -> MicroBatch:
        # The text decides how many documents there are; here each sample is one.
        isolated = plan.job.data.isolate_documents
        return MicroBatch(
            tokens=column(),
            targets=column(),
            positions=column(),
            documents=Documents(column(), ((shape[1],),) * shape[0]) if isolated else None,
            serial=column() if draws(plan.model) else None,
        )

    return [batch() for _ in range(taken(par)[replica_of(par, coord)])]


class Recorder:
    """Records the transfers of the engine's counter: the distinct ones, and their sequence."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, str, int, tuple[int, ...]], int] = {}
        self.sequence: list[int] = []

    def transfer(self, name: str, axis: str, size: int, ranks: Sequence[int]) -> None:
        kind = name.partition(" ")[0], axis, size, tuple(ranks)
        self.sequence.append(self.kinds.setdefault(kind, len(self.kinds)))

    def receive(self, axis: str, size: int, ranks: Sequence[int]) -> None:
        self.transfer("receive", axis, size, ranks)

    def on_arrival(self, work: dist.Work | None) -> Callable[[], None]:
        return lambda: None
