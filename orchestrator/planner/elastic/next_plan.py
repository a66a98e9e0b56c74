"""The next plan of an elastic run whose nodes changed: which healthy nodes it uses, and in which
size. Pure.

The sizes are those that `sizes.plan_sizes` found legal at submission, each with its plan: same
global batch, tensor and context parallelism; other data parallelism, accumulation, shares of
replicas, and for the fewest nodes another pipeline depth. The smallest change is taken
(reliability.md 4): a spare replaces a lost node, and every other rank stays where it is; else the
largest size that the healthy nodes can hold, with the others as spares; below the smallest size,
none.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.document import Cluster, SwitchLevel
from orchestrator.planner.placement.rank_assignment import used_nodes


def legal_size(sizes: Collection[int], nodes: int) -> int | None:
    """The largest of `sizes` that `nodes` nodes can hold."""
    return max((size for size in sizes if size <= nodes), default=None)


def next_plan(current: Plan, sizes: Mapping[int, Plan], healthy: Collection[str]) -> Plan | None:
    """The plan of the next epoch on `healthy` nodes; `current` where nothing changes, None where no
    size fits.

    `sizes`: node count -> plan as submitted. `healthy` may hold nodes that no plan knows, as
    spares. All sizes have the same tensor-parallel degree, so no change takes tensor-parallel
    groups across nodes.
    """
    from .replan import (
        replace_nodes,
        replan,
    )  # here, because agents ask this module for sizes without needing numpy

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
                full_plan, in_cluster_order(full_plan, _chosen(full_plan, surviving, healthy, size))
            ),
        )
    if len(surviving) == len(used):
        return current
    spares = in_cluster_order(full_plan, set(healthy) - set(surviving))
    nodes = []
    for node in used:
        if node not in healthy:
            node = min(
                spares, key=functools.partial(_distance, full_plan, node)
            )  # of equals the first
            spares.remove(node)
        nodes.append(node)
    return replace_nodes(current, restrict(full_plan, nodes))


def larger_plan(current: Plan, sizes: Mapping[int, Plan], nodes: int) -> Plan | None:
    """The plan, as submitted, that the run could grow to on `nodes` nodes; None when no larger size
    is legal."""
    size = legal_size(sizes, nodes)
    return sizes[size] if size is not None and size > len(used_nodes(current)) else None


def pays(
    current: Plan, larger: Plan, *, stable_s: float, dwell_s: float, cost_s: float, horizon_s: float
) -> bool:
    """Whether a healthy run should stop at a step boundary and continue with more nodes.

    The run must have been stable for `dwell_s`, and the faster steps must save more in `horizon_s`
    than the `cost_s` of saving, stopping and starting. All in seconds.
    """
    faster = (
        current.parallel.world_size / larger.parallel.world_size
    )  # of a program's steps nothing else is known
    if not larger.program:
        faster = larger.time.step_s / current.time.step_s
    saved = horizon_s * (1 - faster)
    return stable_s >= dwell_s and saved > cost_s


def horizon_s(left_s: float, watched_s: float, faults: int, stable_s: float) -> float:
    """Seconds until the run's end or the next expected fault.

    A fault is expected after the mean time between faults, or after `stable_s` where that is
    longer.
    """
    return min(left_s, max(watched_s / faults, stable_s)) if faults else left_s


# ----------------------------------------------------------------------------------------------
#     nodes


def restrict(cluster: Cluster, nodes: Sequence[str]) -> Cluster:
    """`whole` with exactly these nodes, in this order. Unknown nodes are under a switch of their
    own."""
    new_index = {node: index for index, node in enumerate(nodes)}
    new_index_of = {
        index: new_index[node] for index, node in enumerate(cluster.node_names) if node in new_index
    }
    unknown = [new_index[node] for node in nodes if node not in cluster.node_names]

    def cut(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
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
    return structs.replace(cluster, node_names=list(nodes), nvlink_domains=domains, levels=levels)


def in_cluster_order(cluster: Cluster, nodes: Collection[str]) -> list[str]:
    """`nodes` in the cluster's order; unknown ones last, by name."""
    cluster_nodes = [node for node in cluster.node_names if node in nodes]
    return cluster_nodes + sorted(set(nodes) - set(cluster_nodes))


def _chosen(
    cluster: Cluster, surviving: Sequence[str], healthy: Collection[str], size: int
) -> list[str]:
    """`size` of the healthy nodes: first those that hold ranks now, then those closest to them."""
    candidates = in_cluster_order(cluster, set(healthy) - set(surviving))
    chosen = list(surviving)
    while len(chosen) > size:  # the node farthest from the others becomes a spare
        chosen.remove(max(reversed(chosen), key=lambda node: _apart(cluster, node, chosen)))
    while len(chosen) < size:
        chosen.append(min(candidates, key=lambda node: _apart(cluster, node, chosen)))
        candidates.remove(chosen[-1])
    return chosen


def _apart(cluster: Cluster, node: str, neighbours: Sequence[str]) -> int:
    return sum(_distance(cluster, node, neighbour) for neighbour in neighbours if neighbour != node)


def _distance(cluster: Cluster, a: str, b: str) -> int:
    """Lowest tier on which two nodes share a block: 0 is an NVLink domain. Unknown nodes are above
    all tiers."""
    tiers = [cluster.nvlink_domains, *(level.switches for level in cluster.levels)]
    index = {node: i for i, node in enumerate(cluster.node_names)}
    if a in index and b in index:
        for height, blocks in enumerate(tiers):
            if any(index[a] in block and index[b] in block for block in blocks):
                return height
    return len(tiers)
