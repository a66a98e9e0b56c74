"""Lower bound of a step on a network over all node placements. Pure.

For every axis: its groups need a certain number of nodes each; where not all of them fit under switches of a tier, at
least one crosses the next tier and pays its rate and latency. Congestion counts only at the nodes' own NICs, whose load
does not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.plan.document import Axis, Parallel
from orchestrator.plan.ranks import degrees
from orchestrator.planner.cost.collective import PATTERN
from orchestrator.planner.cost.fabric import NO_PATH, Fabric, Ints, Path, Pattern
from orchestrator.planner.cost.step_time import Work, assemble, exposed_seconds
from orchestrator.planner.cost.traffic import Traffic

from .axis_order import group_members


def placement_lower_bound(
    fabric: Fabric, order: Sequence[Axis], parallel: Parallel, traffic: Sequence[Traffic], work: Work, slots: int
) -> float:
    """Lower bound of the step in seconds, for this nesting order and any placement."""
    sizes = degrees(parallel)
    paths = {}
    for item in traffic:
        key = (item.varying, PATTERN[item.operation])
        if key not in paths:
            members = group_members(order, sizes, item.varying)
            wrap = key != (("pp",), "chain") or parallel.vpp > 1
            paths[key] = path_lower_bound(fabric, members, key[1], wrap)
    exposed = exposed_seconds(traffic, paths, work, parallel.pp)
    return assemble(work, exposed, parallel)[0]


def path_lower_bound(fabric: Fabric, members: Ints, pattern: Pattern, wrap: bool) -> Path:
    """A path that costs no more than `fabric.path` of the same groups under any placement."""
    n = members.shape[1]
    if n == 1:
        return NO_PATH
    slot = members // fabric.gpus_per_node
    row = np.sort(slot, axis=1)
    spans = 1 + (row[:, 1:] != row[:, :-1]).sum(axis=1)  # nodes of each group
    nodes = int(spans.min())
    if nodes == 1:
        hop = float(fabric.latency.min())
        turn = hop * (n if wrap and pattern != "exchange" else n - 1)
        return Path(1.0 / float(fabric.rate[0]), hop, turn, fabric.names[0], {})
    # groups that share no nodes: two that share their first node share all
    count = int(np.count_nonzero(np.bincount(row[:, 0])))
    even = bool((spans == nodes).all()) and count * nodes == int(row.max()) + 1 - int(row.min())
    level = _least_level(fabric, nodes, count if even else 1)
    if level == 0:
        return Path(1.0 / float(fabric.rate.max()), float(fabric.latency.min()), 0.0, fabric.names[0], {})
    rate, latency = float(fabric.rate[level:].max()), float(fabric.latency[level:].min())
    nics = max(1.0, 1.0 / fabric.nics_per_gpu)
    domain = int(fabric.gpus[0].max())
    if pattern == "exchange":
        outside = max(0, n - domain) / (n - 1) / (float(fabric.rate[1:].max()) * nics)
        return Path(outside, latency, latency * (n - 1), fabric.names[level], {})
    source, target = (slot, np.roll(slot, -1, axis=1)) if wrap else (slot[:, :-1], slot[:, 1:])
    crossing = source != target
    least = int(crossing.sum(axis=1).min())  # hops between nodes; two hops of a ring reach `level`
    far = min(2 if wrap else 1, least)
    near = float(fabric.latency[0 if domain > fabric.gpus_per_node else 1 :].min())
    hops = (crossing.shape[1] - least) * float(fabric.latency.min()) + (least - far) * near + far * latency
    seconds = 1.0 / ((min(n, domain) if pattern == "ring" else 1) * rate * nics)
    if domain == fabric.gpus_per_node:  # what leaves a node does not depend on where the node is
        load = np.bincount(source[crossing])
        seconds = max(seconds, float(load.max()) / (fabric.gpus_per_node * float(fabric.rate[1:].max())))
        if pattern == "ring" and even and n % nodes == 0:
            seconds = max(seconds, nodes / (n * rate * nics))
    return Path(seconds, latency, hops, fabric.names[level], {})


def _least_level(fabric: Fabric, nodes: int, groups: int) -> int:
    """Lowest tier whose blocks can hold `groups` disjoint groups of `nodes` nodes each."""
    for tier in range(len(fabric.names)):
        sizes = np.bincount(fabric.block[tier])
        if int((sizes // nodes).sum()) >= groups:
            return tier
    return len(fabric.names) - 1
