"""Before step 0: every worker holds the agreed plan and stands where that plan says.

A worker on the wrong node trains correctly and slowly (its tensor-parallel group crosses the network), and a worker
with another plan trains wrongly; neither fails by itself. So all ranks exchange who and where they are, each judges the
whole table with the same pure function, and all end with the same line and exit code 65.
"""

from __future__ import annotations

from msgspec import Struct, json

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv
from trainer.errors import PlanMismatch

from .messages import all_gather_bytes


class Seat(Struct, frozen=True, kw_only=True):
    """Who one worker is. `told` is the plan hash that its agent gave it, `held` that of the plan file it has read."""

    rank: int
    node: str
    local_rank: int
    epoch: int
    told: str
    held: str


def seat_of(plan: Plan, env: WorkerEnv) -> Seat:
    return Seat(
        rank=env.rank,
        node=env.node,
        local_rank=env.local_rank,
        epoch=env.epoch,
        told=env.plan_hash,
        held=plan.hash,
    )


def check_env(plan: Plan, env: WorkerEnv) -> None:
    """What must hold before this rank may join a group at all. Raises PlanMismatch."""
    world = plan.parallel.world_size
    if env.world_size != world:
        raise PlanMismatch(f"rank {env.rank} was started for {env.world_size} workers, the plan has {world}")
    if not 0 <= env.rank < world:
        raise PlanMismatch(f"rank {env.rank} on {env.node!r} is outside the plan's ranks 0..{world - 1}")


def check_peers(plan: Plan, env: WorkerEnv) -> None:
    """Exchange seats over the default group and judge them. Every rank must call it; every rank raises or none does."""
    problem = find_mismatch(plan, exchange(seat_of(plan, env)))
    if problem:
        raise PlanMismatch(problem)


def exchange(seat: Seat) -> list[Seat]:
    """All ranks' seats, by rank of the default group."""
    return [json.decode(raw, type=Seat) for raw in all_gather_bytes(json.encode(seat))]


def find_mismatch(plan: Plan, seats: list[Seat]) -> str | None:
    """None, or one line naming the first rank that contradicts the plan or its peers. Pure; the same on every rank."""
    first = seats[0]
    for index, seat in enumerate(seats):
        who = f"rank {index} on {seat.node!r}"
        if seat.rank != index:
            return f"{who} calls itself rank {seat.rank}"
        if seat.epoch != first.epoch:
            return f"{who} is of plan epoch {seat.epoch}, rank 0 on {first.node!r} of {first.epoch}"
        if seat.told != seat.held:
            return f"{who} was told plan {seat.told[:12] or '(none)'}, its plan file is {seat.held[:12]}"
        if seat.held != first.held:
            return f"{who} has plan {seat.held[:12]}, rank 0 on {first.node!r} has {first.held[:12]}"
    occupant = {(rank.node, rank.gpu): rank.rank for rank in plan.ranks}
    for seat, place in zip(seats, plan.ranks, strict=True):
        if (seat.node, seat.local_rank) != (place.node, place.gpu):
            meant = occupant.get((seat.node, seat.local_rank))
            whose = "no rank's place" if meant is None else f"rank {meant}'s place"
            return (
                f"rank {seat.rank} runs on {seat.node!r} as local rank {seat.local_rank}, which is {whose}:"
                f" the plan puts it on {place.node!r} as local rank {place.gpu}"
            )
    return None
