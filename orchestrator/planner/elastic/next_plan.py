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
    held = used_nodes(current)
    kept = [node for node in held if node in healthy]
    full_plan = sizes[max(sizes)].cluster
    if size != len(held):
        return replan(
            sizes[size],
            restrict(
                full_plan, in_cluster_order(full_plan, _chosen(full_plan, kept, healthy, size))
            ),
        )
    if len(kept) == len(held):
        return current
    spares = in_cluster_order(full_plan, set(healthy) - set(kept))
    nodes = []
    for node in held:
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


def restrict(whole: Cluster, nodes: Sequence[str]) -> Cluster:
    """`whole` with exactly these nodes, in this order. Unknown nodes are under a switch of their
    own."""
    at = {node: index for index, node in enumerate(nodes)}
    old = {index: at[node] for index, node in enumerate(whole.node_names) if node in at}
    strange = [at[node] for node in nodes if node not in whole.node_names]

    def cut(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
        found = [sorted(old[node] for node in block if node in old) for block in blocks]
        return [block for block in found if block]

    levels: list[SwitchLevel] = []
    for level in whole.levels:
        switches = cut(level.switches) + ([strange] if strange else [])
        levels.append(structs.replace(level, switches=sorted(switches)))
    levels[-1] = structs.replace(levels[-1], switches=[list(range(len(nodes)))])
    domains = sorted(cut(whole.nvlink_domains) + [[node] for node in strange])
    return structs.replace(whole, node_names=list(nodes), nvlink_domains=domains, levels=levels)


def in_cluster_order(whole: Cluster, nodes: Collection[str]) -> list[str]:
    """`nodes` in the cluster's order; unknown ones last, by name."""
    known = [node for node in whole.node_names if node in nodes]
    return known + sorted(set(nodes) - set(known))


def _chosen(whole: Cluster, kept: Sequence[str], healthy: Collection[str], size: int) -> list[str]:
    """`size` of the healthy nodes: first those that hold ranks now, then those closest to them."""
    rest = in_cluster_order(whole, set(healthy) - set(kept))
    chosen = list(kept)
    while len(chosen) > size:  # the node farthest from the others becomes a spare
        chosen.remove(max(reversed(chosen), key=lambda node: _apart(whole, node, chosen)))
    while len(chosen) < size:
        chosen.append(min(rest, key=lambda node: _apart(whole, node, chosen)))
        rest.remove(chosen[-1])
    return chosen


def _apart(whole: Cluster, node: str, others: Sequence[str]) -> int:
    return sum(_distance(whole, node, other) for other in others if other != node)


def _distance(whole: Cluster, a: str, b: str) -> int:
    """Lowest tier on which two nodes share a block: 0 is an NVLink domain. Unknown nodes are above
    all tiers."""
    tiers = [whole.nvlink_domains, *(level.switches for level in whole.levels)]
    index = {node: i for i, node in enumerate(whole.node_names)}
    if a in index and b in index:
        for height, blocks in enumerate(tiers):
            if any(index[a] in block and index[b] in block for block in blocks):
                return height
    return len(tiers)
