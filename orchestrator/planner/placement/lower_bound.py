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
from typing import NamedTuple

from orchestrator.cost.dual import value_of
from orchestrator.cost.numpy_import import np
from orchestrator.cost.path_cache import Cuts, communicating
from orchestrator.cost.rates import Rates
from orchestrator.cost.time.fabric import NO_PATH, Bools, Fabric, Ints, Path, Pattern
from orchestrator.cost.time.step_bound import bound_over_paths_s
from orchestrator.cost.time.step_time import INNER, StepCost, Work
from orchestrator.cost.time.traffic import PathKey
from orchestrator.plan.document import Axis, Parallel
from orchestrator.plan.ranks import degrees


def placement_lower_bound(
    fabric: Fabric,
    order: Sequence[Axis],
    parallel: Parallel,
    keys: Iterable[PathKey],
    work: Work,
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


class _Groups(NamedTuple):
    """The groups of an axis on the node slots of a job, each over at least two nodes."""

    size: int  # members
    nodes: int  # the fewest nodes of a group
    even: bool  # all groups have `nodes` nodes, which they fill without a gap
    wrap: bool  # the last member sends to the first
    source: Ints  # the slot of each member that sends, by group
    crossing: Bools  # whether its message leaves the node


def path_lower_bound(
    fabric: Fabric,
    members: Ints,
    pattern: Pattern,
    wrap: bool,
    ratio: float = 1.0,
) -> Path:
    """Returns a path that costs no more than `fabric.path` of the same groups under any placement.

    `ratio` is the result of `nvlink_over_fabric`.
    """
    size = members.shape[1]
    if size == 1:
        return NO_PATH
    slot = members // fabric.gpus_per_node
    row = np.sort(slot, axis=1)
    spans = 1 + (row[:, 1:] != row[:, :-1]).sum(axis=1)  # nodes of each group
    nodes = int(spans.min())
    if nodes == 1:
        return _path_in_node(fabric, size, pattern, wrap)
    if wrap:
        source = slot
        target = np.roll(slot, -1, axis=1)
    else:
        source = slot[:, :-1]
        target = slot[:, 1:]
    # Groups that share no nodes: two groups that share their first node share all nodes.
    count = int(np.count_nonzero(np.bincount(row[:, 0])))
    even = bool((spans == nodes).all())
    if even:
        span_of_all = int(row.max()) + 1 - int(row.min())
        even = count * nodes == span_of_all
    groups = _Groups(
        size,
        nodes,
        even,
        wrap,
        source,
        crossing=source != target,
    )
    level = _least_level(fabric, nodes, count if even else 1)
    if level == 0:
        return _path_in_domain(fabric, groups, pattern, ratio)
    if pattern == "exchange":
        return _exchange_across(fabric, size, level)
    return _path_across(fabric, groups, pattern, level)


def _nics_of_sender(fabric: Fabric) -> float:
    """Returns the number of NICs that a GPU that sends alone can use."""
    return max(1.0, 1.0 / fabric.nics_per_gpu)


def _alone_seconds(fabric: Fabric) -> float:
    """Returns the seconds per byte of a GPU that sends alone on the network."""
    return 1.0 / (float(fabric.rate[1:].max()) * _nics_of_sender(fabric))


def _path_in_node(fabric: Fabric, size: int, pattern: Pattern, wrap: bool) -> Path:
    """Returns the bound of groups of `size` members, some of which fit a node."""
    hop = float(fabric.latency.min())
    hops = size if wrap and pattern != "exchange" else size - 1
    return Path(
        nvlink_s=fabric.domain_seconds(2 if pattern == "chain" else size),
        fabric_s=0.0,
        hop_s=hop,
        ring_latency_s=hop * hops,
        worst_level=fabric.names[0],
        share={},
    )


def _path_in_domain(
    fabric: Fabric,
    groups: _Groups,
    pattern: Pattern,
    ratio: float,
) -> Path:
    """Returns the bound of groups that may all lie inside one NVLink domain each.

    Such a group is inside one domain, or, if no two neighbours share a node, wholly outside. Then
    all `u` GPUs of a domain that the job uses send out of it: a ring over the NICs of at most `u`
    GPUs.
    """
    near = 1.0 / float(fabric.rate[0])
    if pattern == "exchange" or groups.crossing.all():
        domain = int(fabric.gpus[0].max())
        nics = _nics_of_sender(fabric)
        nic = _alone_seconds(fabric)
        alone = {
            "ring": nic * nics / math.sqrt(domain * nics),
            "chain": nic,
            "exchange": nic / 2,
        }
        near = min(near, alone[pattern] * ratio)
    return Path(
        nvlink_s=near,
        fabric_s=0.0,
        hop_s=float(fabric.latency.min()),
        ring_latency_s=0.0,
        worst_level=fabric.names[0],
        share={},
    )


def _exchange_across(fabric: Fabric, size: int, level: int) -> Path:
    """Returns the bound of an all-to-all of `size` members, one of which crosses `level`."""
    domain = int(fabric.gpus[0].max())
    latency = float(fabric.latency[level:].min())
    # The largest possible share: in an exchange by domain, fewer domains receive fewer rows per
    # token.
    inside = (min(size, domain) - 1) / (size - 1)
    return Path(
        nvlink_s=0.0,
        fabric_s=max(0, size - domain) / (size - 1) * _alone_seconds(fabric),
        hop_s=latency,
        ring_latency_s=latency * (size - 1),
        worst_level=fabric.names[level],
        share={fabric.names[0]: inside},
    )


def _path_across(fabric: Fabric, groups: _Groups, pattern: Pattern, level: int) -> Path:
    """Returns the bound of rings or chains, one of which crosses `level`."""
    # Unless every message leaves its node, some two neighbours share a node.
    inside = 0.0 if groups.crossing.all() else 1.0 / float(fabric.rate[0])
    return Path(
        nvlink_s=inside,
        fabric_s=_network_seconds(fabric, groups, pattern, level),
        hop_s=float(fabric.latency[level:].min()),
        ring_latency_s=_hops_latency(fabric, groups, level),
        worst_level=fabric.names[level],
        share={},
    )


def _hops_latency(fabric: Fabric, groups: _Groups, level: int) -> float:
    """Returns the least sum of the latencies of all hops of a group that crosses `level`."""
    crossing = groups.crossing
    # Hops between nodes; two hops of a ring reach `level`.
    least = int(crossing.sum(axis=1).min())
    far = min(2 if groups.wrap else 1, least)
    domain_spans_nodes = int(fabric.gpus[0].max()) > fabric.gpus_per_node
    near = float(fabric.latency[0 if domain_spans_nodes else 1 :].min())
    latency: float = (
        (crossing.shape[1] - least) * float(fabric.latency.min())
        + (least - far) * near
        + far * float(fabric.latency[level:].min())
    )
    return latency


def _network_seconds(
    fabric: Fabric,
    groups: _Groups,
    pattern: Pattern,
    level: int,
) -> float:
    """Returns the least seconds per byte on the network of rings or chains that cross `level`."""
    size = groups.size
    nics = _nics_of_sender(fabric)
    domain = int(fabric.gpus[0].max())
    rate = float(fabric.rate[level:].max())
    seconds = 1.0 / ((min(size, domain) if pattern == "ring" else 1) * rate * nics)
    # The traffic that leaves a node does not depend on where the node is.
    if domain == fabric.gpus_per_node:
        load = np.bincount(groups.source[groups.crossing])
        node_rate = fabric.gpus_per_node * float(fabric.rate[1:].max())
        seconds = max(seconds, float(load.max()) / node_rate)
        if pattern == "ring" and groups.even and size % groups.nodes == 0:
            seconds = max(seconds, groups.nodes / (size * rate * nics))
    return seconds


def _least_level(fabric: Fabric, nodes: int, groups: int) -> int:
    """Returns the lowest tier whose blocks hold `groups` disjoint groups of `nodes` nodes each."""
    for tier in range(len(fabric.names)):
        sizes = np.bincount(fabric.block[tier])
        if int((sizes // nodes).sum()) >= groups:
            return tier
    return len(fabric.names) - 1
