"""Checks before step 0 that every worker has loaded the same plan and runs on its planned node and
GPU.

A worker on the wrong node trains correctly but slowly (its tensor-parallel group crosses the
network), and a worker with another plan trains wrongly; neither fails by itself. So rank 0 gathers
the identities of all ranks and checks the whole table with a pure function, and all ranks raise the
same error (exit code 65).
"""

from __future__ import annotations

from msgspec import Struct, json

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv
from trainer.errors import PlanMismatch

from .control import WORLD, ControlPath


class WorkerIdentity(Struct, frozen=True, kw_only=True):
    """The identity of one worker. `assigned_plan`: the plan hash from its agent; `loaded_plan`:
    that of the plan file that the worker has read."""

    rank: int
    node: str
    local_rank: int
    epoch: int
    assigned_plan: str
    loaded_plan: str


def identity_of(plan: Plan, env: WorkerEnv) -> WorkerIdentity:
    """Returns the identity of this worker."""
    return WorkerIdentity(
        rank=env.rank,
        node=env.node,
        local_rank=env.local_rank,
        epoch=env.epoch,
        assigned_plan=env.plan_hash,
        loaded_plan=plan.hash,
    )


def check_env(plan: Plan, env: WorkerEnv) -> None:
    """Checks this rank and the world size before the worker joins any group. Raises
    PlanMismatch."""
    world = plan.parallel.world_size
    if env.world_size != world:
        raise PlanMismatch(
            f"rank {env.rank} was started for {env.world_size} workers, the plan has {world}"
        )
    if not 0 <= env.rank < world:
        raise PlanMismatch(
            f"rank {env.rank} on {env.node!r} is outside the plan's ranks 0..{world - 1}"
        )


def check_peers(plan: Plan, env: WorkerEnv, control: ControlPath = WORLD) -> None:
    """Gathers all identities on rank 0 and checks them there. Collective; either all ranks raise
    PlanMismatch or none does."""

    def verdict(identities: list[bytes]) -> str:
        workers = [json.decode(identity, type=WorkerIdentity) for identity in identities]
        return find_mismatch(plan, workers) or ""

    if problem := control.judge(json.encode(identity_of(plan, env)), verdict):
        raise PlanMismatch(problem)


def find_mismatch(plan: Plan, workers: list[WorkerIdentity]) -> str | None:
    """Returns one line that names the first rank that contradicts the plan or its peers, or None.
    Pure."""
    first = workers[0]
    for index, worker in enumerate(workers):
        worker_name = f"rank {index} on {worker.node!r}"
        if worker.rank != index:
            return f"{worker_name} calls itself rank {worker.rank}"
        if worker.epoch != first.epoch:
            return (
                f"{worker_name} is of plan epoch {worker.epoch},"
                f" rank 0 on {first.node!r} of {first.epoch}"
            )
        if worker.assigned_plan != worker.loaded_plan:
            assigned = worker.assigned_plan[:12] or "(none)"
            return (
                f"{worker_name} was assigned plan {assigned},"
                f" its plan file is {worker.loaded_plan[:12]}"
            )
        if worker.loaded_plan != first.loaded_plan:
            return (
                f"{worker_name} has plan {worker.loaded_plan[:12]}, rank 0 on {first.node!r} has"
                f" {first.loaded_plan[:12]}"
            )
    occupant = {(rank.node, rank.gpu): rank.rank for rank in plan.ranks}
    for worker, planned in zip(workers, plan.ranks, strict=True):
        if (worker.node, worker.local_rank) != (planned.node, planned.gpu):
            planned_rank = occupant.get((worker.node, worker.local_rank))
            planned_for = (
                "no rank's place" if planned_rank is None else f"rank {planned_rank}'s place"
            )
            return (
                f"rank {worker.rank} runs on {worker.node!r} as local rank {worker.local_rank},"
                f" which is {planned_for}: the plan puts it on {planned.node!r} as local rank"
                f" {planned.gpu}"
            )
    return None
