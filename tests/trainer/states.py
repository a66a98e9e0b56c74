"""Small states and checkpoint folders that tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import torch

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.worker import EventReport
from tests.beds.plans import make_plan
from tests.trainer.samples import engine_of
from trainer.checkpoint.fence import Fence
from trainer.checkpoint.format import StatePiece
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.save import Contents, save
from trainer.parallel.params import whole
from trainer.precision import FP64
from trainer.verify.oracle import Outcome
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import step_batches

PLAN = make_plan(dp=2)
KINDS = ("master", "exp_avg", "exp_avg_sq")


class Recorder:
    """Takes the reporter's place and remembers."""

    def __init__(self) -> None:
        self.events: list[EventReport] = []

    def event(self, name: str, step: int | None = None, **fields: object) -> None:
        self.events.append(EventReport(rank=0, epoch=0, name=name, step=step, fields=fields))

    def named(self, name: str) -> list[EventReport]:
        return [event for event in self.events if event.name == name]


def checkpoints(
    folder: Path,
    epoch: int = 0,
    rank: int = 0,
    plan: Plan = PLAN,
    run: str = "run",
    memory: Path | None = None,
) -> Checkpoints:
    return Checkpoints(folder, plan, Fence(run, epoch), rank, Recorder(), memory=memory)


def opened(folder: Path, *args: object, **options: object) -> Checkpoints:
    """`checkpoints` that may save."""
    manager = checkpoints(folder, *args, **options)
    manager.resume(lambda: [])
    return manager


def saved_and_resumed(
    folder: Path, first: Plan, second: Plan, expected: list[Outcome], rtol: float, atol: float
) -> None:
    """A step of the layout `first`, and one of `second` from its checkpoint: the weights are those
    of `expected`."""

    def save(rank: int) -> None:
        engine = engine_of(first, rank, FP64)
        _, norm = engine.gradients(*step_batches(first, engine.mesh.coord, 0))
        engine.update(norm, learning_rate(1, first.job.optim, first.job.train.steps))
        engine.buckets.wait_params()
        opened(folder, 0, rank, first).save(
            list(engine.state_pieces(to_write=True)), 1, 4, engine.scalars()
        )

    def resume(rank: int) -> None:
        engine = engine_of(second, rank, FP64)
        manifest = checkpoints(folder, 1, rank, second).resume(
            lambda: list(engine.state_pieces(to_write=False))
        )
        engine.resumed(manifest.step, manifest.scalars)
        _, norm = engine.gradients(*step_batches(second, engine.mesh.coord, 4))
        engine.update(norm, learning_rate(2, second.job.optim, second.job.train.steps))
        engine.buckets.wait_params()
        for info, param in engine.buckets.full_params():
            expected_weights = expected[1].weights[info.name][info.global_slices]
            torch.testing.assert_close(info.valid(param), expected_weights, rtol=rtol, atol=atol)

    run_ranks(save, first.parallel.world_size)
    run_ranks(resume, second.parallel.world_size)


def flip_bit(file: Path) -> None:
    """One bit, in the middle of the data: sizes and headers stay right (torch's DCP loads this
    silently)."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) * 3 // 4] ^= 1
    file.write_bytes(raw)


def no_room(*args: object, **options: object) -> None:
    """Stands in the place of a function that writes."""
    raise OSError(28, "No space left on device")


def shapes() -> dict[str, tuple[int, ...]]:
    return {"embed.weight": (257, 8), "layers.0.attn.wq.weight": (8, 8), "norm.weight": (8,)}


def state(seed: int, dtype: torch.dtype = torch.float32) -> list[StatePiece]:
    generator = torch.Generator().manual_seed(seed)
    return [
        StatePiece(
            kind, whole(name, shape), 0, torch.randn(shape, generator=generator).to(dtype).view(-1)
        )
        for name, shape in shapes().items()
        for kind in KINDS
    ]


def equal(pieces: list[StatePiece], expected: list[StatePiece]) -> bool:
    return all(torch.equal(a.data, b.data) for a, b in zip(pieces, expected, strict=True))


def saved(folder: Path, *steps: int, keep_last: int = 9) -> Checkpoints:
    """A folder with a checkpoint of `state(step)` for each step."""
    manager = checkpoints(folder, plan=make_plan(dp=2))
    manager.resume(lambda: state(0))
    for step in steps:
        save(manager.target, Contents(step, step * 10, state(step)), keep_last)
    return manager


def resume(
    folder: Path, epoch: int = 1, **options: object
) -> tuple[list[StatePiece], Checkpoints, object]:
    live = state(999)
    manager = checkpoints(folder, epoch, **options)
    return live, manager, manager.resume(lambda: live)
