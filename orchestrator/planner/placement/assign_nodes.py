"""The nodes of a plan: which of the free ones, in which order, and how far from the best that can be."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.config.validate import said
from orchestrator.plan.document import Axis, Certificate, Cluster, Parallel
from orchestrator.planner.cost.step_time import step_work
from orchestrator.planner.cost.traffic import step_traffic
from orchestrator.planner.solve import Ground

from .node_placement import Table, reorder, seat


def wanted(config: Config, pool: Cluster) -> Cluster:
    """As many of the pool's nodes as the degrees ask for, to judge them by; which ones is decided later.

    A described cluster is the job's own and must be filled. An imported one may be larger: dp left out takes all of it.
    """
    par = said(config.parallel)
    if config.cluster.topology_file is None or par.dp is None:
        return pool
    places = -(-par.tp * par.cp * par.ep * par.pp * par.dp // pool.gpus_per_node)
    if places >= len(pool.node_names):
        return pool
    keep = set(range(places))

    def kept(blocks: list[list[int]]) -> list[list[int]]:
        return [inside for block in blocks if (inside := [node for node in block if node in keep])]

    return structs.replace(
        pool,
        node_names=pool.node_names[:places],
        nvlink_domains=kept(pool.nvlink_domains),
        levels=[structs.replace(level, switches=kept(level.switches)) for level in pool.levels],
    )


def seated(
    ground: Ground, parallel: Parallel, only: Sequence[Axis] | None = None, move: bool = True
) -> tuple[Ground, Certificate]:
    """The ground with its nodes in the order of the best seating (spares last), and how good that is.

    Without `move` the nodes stay as they are, and are only certified.
    """
    traffic = step_traffic(ground.model, parallel, ground.train)
    work = step_work(ground.model, parallel, ground.train, ground.rate)
    if not move:
        table = Table(ground.roads, parallel, traffic, work, only)
        bound = table.bound()
        return ground, Certificate(bound_s=bound, gap=0.0, exact=False, given_step_s=0.0)
    found = seat(ground.roads, parallel, traffic, work, only)
    if found.nodes != tuple(range(len(found.nodes))):
        ground = Ground(reorder(ground.cluster, found.nodes), ground.model, ground.train)
    given = found.given.step_s
    return ground, Certificate(bound_s=found.bound_s, gap=found.gap, exact=found.exact, given_step_s=given)


def certified(certificate: Certificate, step_s: float) -> Certificate:
    """With the gap of the step that the plan predicts; the bound can be no higher than that."""
    bound = min(certificate.bound_s, step_s)
    gap = 0.0 if certificate.exact else step_s / bound - 1
    return structs.replace(certificate, bound_s=bound, gap=gap, given_step_s=certificate.given_step_s or step_s)
