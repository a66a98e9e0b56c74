"""Places a planned job on other nodes.

Degrees, model and batch stay; the rank map and the predictions are computed for the new nodes.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from orchestrator.cluster.hostlist import compress
from orchestrator.cost.context import CostContext
from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.nesting import axis_placement
from orchestrator.cost.of_plan import context_of
from orchestrator.errors import OrchError
from orchestrator.plan import Plan, seal
from orchestrator.plan.document import Axis, Certificate, Cluster
from orchestrator.plan.exits import Exit
from orchestrator.plan.ranks import AXES, coords, degrees, nested_groups
from orchestrator.planner.placement.best_order import solve
from orchestrator.planner.placement.node_placement import certified, place_job
from orchestrator.planner.placement.rank_assignment import assign_ranks
from orchestrator.planner.program import place_program


def replan(plan: Plan, cluster: Cluster) -> Plan:
    """Places `plan` on `cluster` and seals it. Raises OrchError (76) if the cluster is too small.

    The nesting order is chosen for the new nodes, because the best order depends on them.
    """
    if plan.program:
        return place_program(plan, cluster)
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    world = plan.parallel.world_size
    if cluster.gpus_per_node != plan.cluster.gpus_per_node or world > gpus:
        have = f"{len(cluster.node_names)} nodes of {cluster.gpus_per_node} GPUs"
        raise OrchError(
            f"the plan needs {world} GPUs, {plan.cluster.gpus_per_node} per node; given: {have}",
            Exit.CAPACITY,
        )
    context, certificate = place_job(context_of(plan, cluster=cluster), plan.parallel)
    return _placed(plan, context, certificate)


def replace_nodes(plan: Plan, cluster: Cluster) -> Plan:
    """Replaces some nodes of `plan` and seals it; the nesting order stays.

    `cluster` has each new node at the index of the node that it replaces. So all other ranks stay
    on their nodes, with their caches and the state in their memory.
    """
    if plan.program:
        return place_program(plan, cluster)
    context = context_of(plan, cluster=cluster)
    order = plan.parallel.order
    context, certificate = place_job(context, plan.parallel, order, move=False)
    return _placed(plan, context, certificate, order)


def _placed(
    plan: Plan,
    context: CostContext,
    certificate: Certificate,
    given_order: Sequence[Axis] | None = None,
) -> Plan:
    """Returns `plan` with a rank map and predictions for the context's nodes.

    The nesting order is `given_order`, or the best one if that is None.
    """
    cluster = context.cluster
    parallel, best, traffic, time = solve(context, plan.parallel, given_order)
    coordinates = coords(parallel.order, degrees(parallel))
    recipe = recipe_of(plan.time.software or "orch", plan.job.optim)
    accounts = memory.memory_by_pp_rank(
        context.workload(parallel, plan.job.train),
        cluster,
        recipe,
        plan.job.matmul,
    )
    worst = max(accounts, key=lambda account: account.total)
    speed_up = plan.time.step_s / time.step_s
    unchanged_time = {
        "sd": plan.time.sd,
        "profile": plan.time.profile,
        "parameters": plan.time.parameters,
    }
    return seal(
        structs.replace(
            plan,
            cluster=cluster,
            parallel=parallel,
            ranks=assign_ranks(cluster, coordinates),
            groups=nested_groups(parallel.order, degrees(parallel)),
            placement=axis_placement(best, traffic),
            memory=structs.replace(
                worst,
                worst_rank=next(
                    rank
                    for rank, coord in enumerate(coordinates)
                    if coord["pp"] == worst.worst_rank
                ),
            ),
            time=structs.replace(time, **unchanged_time),
            mfu=plan.mfu * speed_up,
            tokens_per_s_per_gpu=plan.tokens_per_s_per_gpu * speed_up,
            certificate=certified(certificate, time.step_s),
        )
    )


class Difference(Struct, frozen=True, kw_only=True):
    """The differences between the plan on the scheduler's nodes and the submitted plan."""

    same_nodes: bool
    nodes: list[str]  # in rank order
    moved_ranks: int  # ranks whose node or GPU differs
    order: list[str]
    worst_levels: dict[str, list[str]]  # axis -> [planned, real], only of axes whose level differs
    step_s: list[float]  # predicted seconds per step: [planned, real]

    @property
    def cost(self) -> float:
        """The predicted slow-down: 0.05 is 5 % slower than planned."""
        # A program has no predicted step.
        return self.step_s[1] / self.step_s[0] - 1 if self.step_s[0] else 0.0

    @property
    def text(self) -> str:
        """The difference in one line."""
        if self.same_nodes and not self.moved_ranks:
            return "placed as planned"
        levels = [
            f"{axis} crosses {real} instead of {want}"
            for axis, (want, real) in self.worst_levels.items()
        ]
        change = (
            "no predicted cost" if abs(self.cost) < 0.0005 else f"predicted step {self.cost:+.1%}"
        )
        placement = (
            f"on {compress(self.nodes)}"
            if not self.same_nodes
            else f"{self.moved_ranks} ranks moved"
        )
        description = (
            f"{placement}: {', '.join(levels) or 'every axis on the level that was planned'}"
        )
        return f"{description}; {change}" if self.step_s[0] else description


def difference(planned: Plan, real: Plan) -> Difference:
    """Compares two plans of a job.

    Only the set of node names counts, because the planner chooses their order.
    """
    pairs = list(zip(planned.ranks, real.ranks, strict=True))
    levels = {
        axis: [planned.placement[axis].worst_level, real.placement[axis].worst_level]
        for axis in AXES
        if planned.placement[axis].worst_level != real.placement[axis].worst_level
    }
    return Difference(
        same_nodes={rank.node for rank in planned.ranks} == {rank.node for rank in real.ranks},
        nodes=list(dict.fromkeys(rank.node for rank in real.ranks)),
        moved_ranks=sum((a.node, a.gpu) != (b.node, b.gpu) for a, b in pairs),
        order=list(real.parallel.order),
        worst_levels=levels,
        step_s=[planned.time.step_s, real.time.step_s],
    )
