"""Chooses the next plan of an elastic run whose nodes changed: its healthy nodes, and its size.

The sizes are those that `sizes.plan_sizes` found legal at submission, each with its plan. All have
the same global batch, tensor parallelism and context parallelism. They differ in data parallelism,
accumulation and the micro-batches of each replica, and the smallest sizes may differ in pipeline
depth.

The smallest change is taken (reliability.md 4). A spare replaces a lost node, and every other rank
stays where it is. Without a spare the run takes the largest size that the healthy nodes can hold,
and the remaining nodes become spares. Below the smallest size there is no next plan. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.document import Cluster, SwitchLevel
from orchestrator.planner.placement.rank_assignment import used_nodes


def legal_size(sizes: Collection[int], nodes: int) -> int | None:
    """Returns the largest of `sizes` that `nodes` nodes can hold, or None if none fits."""
    return max((size for size in sizes if size <= nodes), default=None)


def next_plan(
    current: Plan,
    sizes: Mapping[int, Plan],
    healthy: Collection[str],
) -> Plan | None:
    """Returns the plan of the next epoch on the `healthy` nodes.

    Returns `current` if nothing changes, and None if no size fits. `sizes` maps a node count to its
    plan as submitted. `healthy` may hold nodes that no plan knows; they serve as spares. All sizes
    have the same tensor-parallel degree, so no change takes tensor-parallel groups across nodes.
    """
    # Imported here because agents ask this module for sizes and do without numpy.
    from .replan import (
        replace_nodes,
        replan,
    )

    size = legal_size(sizes, len(healthy))
    if size is None:
        return None
    used = used_nodes(current)
    surviving = [node for node in used if node in healthy]
    full_plan = sizes[max(sizes)].cluster
    if size != len(used):
        return replan(
            sizes[size],
            restrict(
                full_plan,
                in_cluster_order(full_plan, _chosen(full_plan, surviving, healthy, size)),
            ),
        )
    if len(surviving) == len(used):
        return current
    spares = in_cluster_order(full_plan, set(healthy) - set(surviving))
    nodes = []
    for node in used:
        if node not in healthy:
            # The first of several equally near spares is taken.
            node = min(spares, key=functools.partial(_distance, full_plan, node))
            spares.remove(node)
        nodes.append(node)
    return replace_nodes(current, restrict(full_plan, nodes))


def larger_plan(current: Plan, sizes: Mapping[int, Plan], nodes: int) -> Plan | None:
    """Returns the plan, as submitted, that the run could grow to on `nodes` nodes.

    Returns None if no larger size is legal.
    """
    size = legal_size(sizes, nodes)
    return sizes[size] if size is not None and size > len(used_nodes(current)) else None


def pays(
    current: Plan,
    larger: Plan,
    *,
    stable_s: float,
    dwell_s: float,
    cost_s: float,
    horizon_s: float,
) -> bool:
    """Decides whether a healthy run should stop at a step boundary and continue with more nodes.

    The run must have been stable for `dwell_s` seconds. Within `horizon_s` seconds, the faster
    steps must save more time than the `cost_s` seconds of saving, stopping and starting.
    """
    # The steps of a program have no predicted time: they are assumed to scale with the ranks.
    faster = current.parallel.world_size / larger.parallel.world_size
    if not larger.program:
        faster = larger.time.step_s / current.time.step_s
    saved = horizon_s * (1 - faster)
    return stable_s >= dwell_s and saved > cost_s


def horizon_s(left_s: float, watched_s: float, faults: int, stable_s: float) -> float:
    """Returns the seconds until the run ends or the next fault is expected.

    A fault is expected after the mean time between faults, or after `stable_s` if that is longer.
    """
    return min(left_s, max(watched_s / faults, stable_s)) if faults else left_s


# ------------------------------------------------------------------------------------------ nodes


def restrict(cluster: Cluster, nodes: Sequence[str]) -> Cluster:
    """Returns `cluster` with exactly these nodes, in this order.

    Nodes that the cluster does not know get a switch of their own.
    """
    new_index = {node: index for index, node in enumerate(nodes)}
    new_index_of = {
        index: new_index[node] for index, node in enumerate(cluster.node_names) if node in new_index
    }
    unknown = [new_index[node] for node in nodes if node not in cluster.node_names]

    def cut(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the blocks with the new indexes of their nodes, without empty blocks."""
        restricted = [
            sorted(new_index_of[node] for node in block if node in new_index_of) for block in blocks
        ]
        return [block for block in restricted if block]

    levels: list[SwitchLevel] = []
    for level in cluster.levels:
        switches = cut(level.switches) + ([unknown] if unknown else [])
        levels.append(structs.replace(level, switches=sorted(switches)))
    levels[-1] = structs.replace(levels[-1], switches=[list(range(len(nodes)))])
    domains = sorted(cut(cluster.nvlink_domains) + [[node] for node in unknown])
    return structs.replace(
        cluster,
        node_names=list(nodes),
        nvlink_domains=domains,
        levels=levels,
    )


def in_cluster_order(cluster: Cluster, nodes: Collection[str]) -> list[str]:
    """Returns `nodes` in the cluster's order; nodes that it does not know come last, by name."""
    cluster_nodes = [node for node in cluster.node_names if node in nodes]
    return cluster_nodes + sorted(set(nodes) - set(cluster_nodes))


def _chosen(
    cluster: Cluster,
    surviving: Sequence[str],
    healthy: Collection[str],
    size: int,
) -> list[str]:
    """Returns `size` healthy nodes: first those that hold ranks now, then those closest to them."""
    candidates = in_cluster_order(cluster, set(healthy) - set(surviving))
    chosen = list(surviving)
    # The node farthest from the others becomes a spare.
    while len(chosen) > size:
        chosen.remove(
            max(
                reversed(chosen),
                key=lambda node: _apart(cluster, node, chosen),
            )
        )
    while len(chosen) < size:
        chosen.append(min(candidates, key=lambda node: _apart(cluster, node, chosen)))
        candidates.remove(chosen[-1])
    return chosen


def _apart(cluster: Cluster, node: str, neighbours: Sequence[str]) -> int:
    """Returns the sum of the distances between a node and its neighbours."""
    return sum(_distance(cluster, node, neighbour) for neighbour in neighbours if neighbour != node)


def _distance(cluster: Cluster, a: str, b: str) -> int:
    """Returns the lowest tier on which two nodes share a block; tier 0 is the NVLink domain.

    A node that the cluster does not know is above all tiers.
    """
    tiers = [cluster.nvlink_domains, *(level.switches for level in cluster.levels)]
    index = {node: i for i, node in enumerate(cluster.node_names)}
    if a in index and b in index:
        for height, blocks in enumerate(tiers):
            if any(index[a] in block and index[b] in block for block in blocks):
                return height
    return len(tiers)
