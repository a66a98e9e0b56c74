"""A lower bound of the step time on a network, over all node placements.

The groups of each axis need a certain number of nodes. If not all of them fit under the switches of
a tier, at least one group crosses the next tier and pays its rate and latency. Congestion counts
only at the nodes' own NICs, whose load does not depend on the placement.

A bound path spends no more seconds on NVLink, and no more on the network, than any real path. Where
a group could use either, the bound takes the seconds of NVLink, or fewer if the network is faster.
So the bound holds whatever share of either link the software reaches. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orchestrator.cost.dual import value_of
from orchestrator.cost.numpy_import import np
from orchestrator.cost.path_cache import Cuts, communicating
from orchestrator.cost.rates import Rates
from orchestrator.cost.time.fabric import NO_PATH, Fabric, Ints, Path, Pattern
from orchestrator.cost.time.step_bound import bound_over_paths_s
from orchestrator.cost.time.step_time import INNER, StepCost, Work
from orchestrator.cost.time.traffic import PathKey
from orchestrator.plan.document import Axis, Parallel
from orchestrator.plan.ranks import degrees


def placement_lower_bound(
    fabric: Fabric, order: Sequence[Axis], parallel: Parallel, keys: Iterable[PathKey], work: Work
) -> float:
    """Returns a lower bound of the step in seconds, for this nesting order and any placement.

    `keys` are the keys of the paths that the order needs.
    """
    sizes = degrees(parallel)
    ratio = nvlink_over_fabric(work.rate)
    cuts = Cuts.of(parallel)
    paths = {}
    inner_known = True
    for key in keys:
        wrap = key != (("pp",), "chain") or parallel.vpp > 1
        members, pattern = communicating(order, sizes, key, cuts)
        paths[key] = path_lower_bound(fabric, members, pattern, wrap, ratio)
        inner = key[0][0] in INNER and (len(key[0]) == 1 or key[1] == "exchange")
        # Groups of one node cost the same on every node.
        if inner:
            inner_known &= bool((np.ptp(members // fabric.gpus_per_node, axis=1) == 0).all())
    return bound_over_paths_s(StepCost(work, paths), inner_known)


def nvlink_over_fabric(rate: Rates) -> float:
    """Returns the smallest ratio of NVLink's reached share to the network's, of any collective."""
    links = (rate.tensor, rate.tensor_outside, rate.ring)
    return min(value_of(link.nvlink) / value_of(link.nic) for link in links)


def path_lower_bound(
    fabric: Fabric, members: Ints, pattern: Pattern, wrap: bool, ratio: float = 1.0
) -> Path:
    """Returns a path that costs no more than `fabric.path` of the same groups under any placement.

    `ratio` is the result of `nvlink_over_fabric`.
    """
    n = members.shape[1]
    if n == 1:
        return NO_PATH
    slot = members // fabric.gpus_per_node
    row = np.sort(slot, axis=1)
    spans = 1 + (row[:, 1:] != row[:, :-1]).sum(axis=1)  # nodes of each group
    nodes = int(spans.min())
    inside = 1.0 / float(fabric.rate[0])
    if nodes == 1:
        hop = float(fabric.latency.min())
        turn = hop * (n if wrap and pattern != "exchange" else n - 1)
        inside = fabric.domain_seconds(2 if pattern == "chain" else n)
        return Path(inside, 0.0, hop, turn, fabric.names[0], {})
    nics = max(1.0, 1.0 / fabric.nics_per_gpu)
    nic = 1.0 / (float(fabric.rate[1:].max()) * nics)  # seconds per byte of a GPU that sends alone
    domain = int(fabric.gpus[0].max())
    source, target = (slot, np.roll(slot, -1, axis=1)) if wrap else (slot[:, :-1], slot[:, 1:])
    crossing = source != target
    # Groups that share no nodes: two groups that share their first node share all nodes.
    count = int(np.count_nonzero(np.bincount(row[:, 0])))
    even = bool((spans == nodes).all()) and count * nodes == int(row.max()) + 1 - int(row.min())
    level = _least_level(fabric, nodes, count if even else 1)
    if level == 0:
        # The group is inside one domain, or, if no two neighbours share a node, wholly outside.
        # Then all `u` GPUs of a domain that the job uses send out of it: a ring over the NICs of at
        # most `u` GPUs.
        alone = {"ring": nic * nics / math.sqrt(domain * nics), "chain": nic, "exchange": nic / 2}[
            pattern
        ]
        near = (
            inside if pattern != "exchange" and not crossing.all() else min(inside, alone * ratio)
        )
        return Path(near, 0.0, float(fabric.latency.min()), 0.0, fabric.names[0], {})
    rate = float(fabric.rate[level:].max())
    latency = float(fabric.latency[level:].min())
    if pattern == "exchange":
        outside = max(0, n - domain) / (n - 1) * nic
        # The largest possible share: in an exchange by domain, fewer domains receive fewer rows per
        # token.
        inside = (min(n, domain) - 1) / (n - 1)
        return Path(
            0.0, outside, latency, latency * (n - 1), fabric.names[level], {fabric.names[0]: inside}
        )
    nvlink = 0.0 if crossing.all() else inside  # some two neighbours share a node
    # Hops between nodes; two hops of a ring reach `level`.
    least = int(crossing.sum(axis=1).min())
    far = min(2 if wrap else 1, least)
    near = float(fabric.latency[0 if domain > fabric.gpus_per_node else 1 :].min())
    hops = (
        (crossing.shape[1] - least) * float(fabric.latency.min())
        + (least - far) * near
        + far * latency
    )
    seconds = 1.0 / ((min(n, domain) if pattern == "ring" else 1) * rate * nics)
    # The traffic that leaves a node does not depend on where the node is.
    if domain == fabric.gpus_per_node:
        load = np.bincount(source[crossing])
        seconds = max(
            seconds, float(load.max()) / (fabric.gpus_per_node * float(fabric.rate[1:].max()))
        )
        if pattern == "ring" and even and n % nodes == 0:
            seconds = max(seconds, nodes / (n * rate * nics))
    return Path(nvlink, seconds, latency, hops, fabric.names[level], {})


def _least_level(fabric: Fabric, nodes: int, groups: int) -> int:
    """Returns the lowest tier whose blocks hold `groups` disjoint groups of `nodes` nodes each."""
    for tier in range(len(fabric.names)):
        sizes = np.bincount(fabric.block[tier])
        if int((sizes // nodes).sum()) >= groups:
            return tier
    return len(fabric.names) - 1
