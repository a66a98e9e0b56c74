"""Records the device allocations of one rank of a plan, from the start of its engine to the end of
its last step, under fake tensors: the sequence that the caching allocator of its GPU would see."""

from __future__ import annotations

import math
from itertools import count

from orchestrator.plan import Plan
from trainer.metrics.memory import StorageTracker

from .caching_allocator import Event
from .run import fake_batches, fake_engine, fake_rank


def record(plan: Plan, rank: int, steps: int = 2) -> list[list[Event]]:
    """Returns the allocations and frees of a rank in order: those until its first step, and those
    of each step. Storages that live on are never freed. Offloaded state counts as if it were on the
    device. Raises LayoutError for a plan that the trainer does not run."""
    ticks = count()
    starts = list[int]()
    with fake_rank(plan, rank), StorageTracker(clock=lambda: float(next(ticks))) as tracker:
        engine = fake_engine(plan, rank)
        engine.pipeline.one_by_one = True
        for _ in range(steps):
            starts.append(next(ticks))
            batches = fake_batches(plan, engine.mesh.coord)
            _, norm = engine.gradients(batches, plan.parallel.global_batch_tokens)
            engine.update(norm, plan.job.optim.lr)
            del batches, norm
        starts.append(next(ticks))
    return _events(tracker, starts)


def _events(tracker: StorageTracker, starts: list[int]) -> list[list[Event]]:
    """Sorts the lifetimes that a tracker has seen into the phases that end at `starts`."""
    changes = list[tuple[float, Event]]()
    for number, lifetime in enumerate(tracker.lifetimes):
        if lifetime.size and lifetime.born < starts[-1]:
            changes.append((lifetime.born, Event(number, lifetime.size)))
            if math.isfinite(lifetime.died) and lifetime.died < starts[-1]:
                changes.append((lifetime.died, Event(number, 0)))
    phases = list[list[Event]]([] for _ in starts)
    for at, event in sorted(changes):
        phase = sum(at >= start for start in starts)
        phases[phase].append(event)
    return phases
