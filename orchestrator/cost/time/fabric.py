"""Seconds per byte and latency of a communication pattern on a network.

The model: every group of an axis runs the same operation at the same time. Each link carries the
sum of what crosses it, and the operation ends when the most loaded link has carried its load. Three
kinds of link count: a GPU's NVLink, a node's NICs (together), and the uplinks of a switch, whose
bandwidth is that of the NICs below it divided by `oversubscription`. So congestion is the load of
shared links, not a hop count (planning.md E2).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from orchestrator.cost.numpy_import import np
from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.document import Cluster, Link, SwitchLevel

#: ring: collectives, whose members on one node share the traffic over all their NICs; chain:
#: point-to-point to the next member, over the GPU's own NIC; exchange: all-to-all.
Pattern = Literal["ring", "chain", "exchange"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Path(Struct, frozen=True):
    """The cost of one pattern over the groups of one axis."""

    #: Seconds per byte that a rank sends, on the links of an NVLink domain at their own rates.
    nvlink_s: float
    fabric_s: float  # the same on the links of the network
    hop_s: float  # latency of the slowest hop
    ring_latency_s: float  # sum of the latencies of all hops of the ring
    worst_level: str
    # Fraction of bytes by level, for the rank that sends most on the worst level.
    share: dict[str, float]
    stretch: dict[str, float] = {}  # operation -> measured factor by which its bytes take longer


NO_PATH = Path(
    nvlink_s=0.0,
    fabric_s=0.0,
    hop_s=0.0,
    ring_latency_s=0.0,
    worst_level=SELF,
    share={},
)


class Fabric:
    """A cluster's network as arrays over nodes.

    Tier 0 is the NVLink domain, tier i the i-th switch level.
    """

    def __init__(self, cluster: Cluster):
        self.names = [NVLINK, *(level.name for level in cluster.levels)]
        self.gpus_per_node = cluster.gpus_per_node
        blocks = [cluster.nvlink_domains, *(level.switches for level in cluster.levels)]
        self.block = np.empty(
            (len(blocks), len(cluster.node_names)), dtype=np.int64
        )  # [tier, node] -> block
        for tier, members in enumerate(blocks):
            for index, nodes in enumerate(members):
                self.block[tier, nodes] = index
        links: list[Link | SwitchLevel] = [cluster.nvlink, *cluster.levels]
        #: Bytes/s of one GPU's share of a path whose ends meet on each tier.
        self.rate: Floats = np.array([link.bytes_per_s for link in links])
        self.latency = np.array([link.latency_s for link in links])
        self.nics_per_gpu = cluster.nics_per_node / cluster.gpus_per_node
        # GPUs below each block.
        self.gpus = [np.array([len(b) * self.gpus_per_node for b in tier]) for tier in blocks]
        #: GPUs to which a GPU has links of its own; 0 if a switch gives it all links to each of
        #: them.
        self.linked_peers = self.gpus_per_node - 1 if cluster.direct_nvlink is True else 0
        slower = cluster.measured.stretch if cluster.measured else {}
        self.stretch = [slower.get(name, {}) for name in self.names]
        self.oversubscription = [1.0, *(level.oversubscription for level in cluster.levels)]
        self._alike = self._blocks_alike()

    def reordered(self, nodes: Sequence[int]) -> Fabric:
        """Returns the network with node `nodes[i]` in node slot i; ranks fill slots in order."""
        fabric = copy.copy(self)
        fabric.block = self.block[:, np.asarray(nodes, dtype=np.int64)]
        fabric._alike = fabric._blocks_alike()
        return fabric

    @property
    def domain_gpus(self) -> float:
        """Neighbouring GPUs of an NVLink domain if all domains are alike, else infinity."""
        return self._alike[0] if self._alike else math.inf

    def _blocks_alike(self) -> list[int]:
        """Returns the GPUs of a block of each tier, innermost first, up to the first uneven tier.

        A tier is uneven if its blocks differ in size, or if the nodes of a block are not
        neighbours.
        """
        equivalents = list[int]()
        for tier, blocks in enumerate(self.block):
            size = int((blocks == blocks[0]).sum())
            runs = blocks.reshape(-1, size) if len(blocks) % size == 0 else blocks[:, None]
            # This is a set because np.unique would import numpy.ma, which takes longer than all of
            # an ordinary plan.
            alike = (runs == runs[:, :1]).all() and len(set(runs[:, 0].tolist())) == len(runs)
            gpus = size * self.gpus_per_node
            if not alike or (self.gpus[tier][blocks] != gpus).any():
                break
            equivalents.append(gpus)
        return equivalents

    def standing_for_all(self, members: Ints, window: int) -> Ints:
        """Returns a subset of `members` with one representative of every equivalent group.

        `members` is int [groups, n] of all ranks. Each group lies in one window of `window`
        neighbouring ranks. Windows that fill equal blocks never leave them, and all blocks behave
        alike.
        """
        for gpus in self._alike:
            if gpus % window == 0 and members.size % gpus == 0:
                return members[members[:, 0] < gpus]
        return members

    def signature(self) -> bytes:
        """Returns a key that is equal for node orders that differ by swaps of equivalent blocks.

        Blocks are numbered by first appearance, next to their sizes.
        """
        shapes = []
        for tier, blocks in enumerate(self.block):
            _, first, inverse = np.unique(blocks, return_index=True, return_inverse=True)
            rank = np.empty(len(first), dtype=np.int64)
            rank[np.argsort(first)] = np.arange(len(first))
            shapes += [rank[inverse], self.gpus[tier][blocks]]
        return np.concatenate(shapes).astype(np.int64).tobytes()

    def domain_seconds(self, members: int) -> float:
        """Returns the seconds per byte on NVLink of a group with `members` members in a domain.

        A point-to-point transfer has two members. Without a switch, a group of some of a node's
        GPUs has only the links between these. Rings take turns through all orders of their members,
        so together they use each of those links.
        """
        unused = self.linked_peers / (members - 1) if self.linked_peers else 1.0
        return unused / float(self.rate[0])

    def path(self, members: Ints, pattern: Pattern, wrap: bool = True) -> Path:
        """Returns the cost of `pattern` if all groups run it at once.

        `members` is int [groups, n]: ranks in the order in which the group's ring or chain visits
        them. `wrap` tells whether the last member sends to the first: rings do, pipelines without
        virtual stages do not.
        """
        if members.shape[1] == 1:
            return NO_PATH
        node = members // self.gpus_per_node
        if pattern == "exchange":
            return self._exchange(node)
        alike = self._on_same_nodes(node)
        return self._neighbours(node[::alike], pattern, wrap, alike)

    def _on_same_nodes(self, node: Ints) -> int:
        """Returns how many consecutive groups lie on the same nodes, as those of a node's GPUs do.

        `node` is the node of each member, int [groups, n].
        """
        count = self.gpus_per_node
        while count > 1:
            if len(node) % count == 0:
                rows = node.reshape(-1, count, node.shape[1])
                if bool((rows == rows[:, :1]).all()):
                    return count
            count //= 2
        return 1

    def _neighbours(self, node: Ints, pattern: Pattern, wrap: bool, alike: int) -> Path:
        """Returns the path of a ring or chain. Each row of `node` represents `alike` groups."""
        level = self._hop_levels(node, wrap)
        hops = self.latency[level]
        worst = int(level.max())
        inside = level == 0
        nvlink_s = self._slowest_domain(node, inside, pattern) if bool(inside.any()) else 0.0
        fabric_s = 0.0
        share = {NVLINK: 1.0}
        if worst:
            # A ring leaves an NVLink domain over the NICs of all its members there, a chain over
            # one GPU's own NIC.
            nics = np.ones(level.shape)
            if pattern == "ring":
                nics = _members_in_block(self.block[0][node])[:, : level.shape[1]]
            fabric_s = self._slowest_hop(node, level, nics, alike)
            nic_share = float((1.0 / nics[level == worst]).max())
            share = {self.names[worst]: nic_share}
            if nic_share < 1.0:
                share = {NVLINK: 1.0 - nic_share, self.names[worst]: nic_share}
        return Path(
            nvlink_s=nvlink_s,
            fabric_s=fabric_s,
            hop_s=float(hops.max()),
            ring_latency_s=float(hops.sum(axis=1).max()),
            worst_level=self.names[worst],
            share=share,
            stretch=self.stretch[worst],
        )

    def _hop_levels(self, node: Ints, wrap: bool) -> Ints:
        """Returns the tier on which each member of a ring or chain meets the next one."""
        hops = node if wrap else node[:, :-1]
        level: Ints = np.full(hops.shape, len(self.names) - 1)
        for tier in range(len(self.names) - 2, -1, -1):
            blocks = self.block[tier][node]
            if wrap:
                together = blocks == np.roll(blocks, -1, axis=1)
            else:
                together = blocks[:, :-1] == blocks[:, 1:]
            level[together] = tier
        return level

    def _slowest_hop(self, node: Ints, level: Ints, nics: Floats, alike: int) -> float:
        """Returns the seconds per byte on the network of the slowest hop outside a domain.

        A hop over some `nics` waits for these, or for the most loaded shared link.
        """
        outside = level > 0
        source = node[:, : level.shape[1]][outside]
        flows = np.full(len(source), float(alike))
        shared_s = self._fullest_link(
            source,
            level[outside],
            flows,
            int(node.max()) + 1,
        )
        own_s = float((1.0 / (nics * self._gpu_bandwidth(level)))[outside].max())
        return max(shared_s, own_s)

    def _slowest_domain(self, node: Ints, inside: Bools, pattern: Pattern) -> float:
        """Returns the seconds per byte on NVLink of hops `inside` a domain.

        The domain with the fewest members of a group is the slowest.
        """
        if not self.linked_peers or pattern == "chain":
            return self.domain_seconds(2)
        members = _members_in_block(self.block[0][node])[:, : inside.shape[1]]
        return self.domain_seconds(int(members[inside].min()))

    def _exchange(self, node: Ints) -> Path:
        """Returns the path of an all-to-all; `node` is int [groups, n]."""
        n = node.shape[1]
        tier_share = self._tier_shares(node)
        used = [tier for tier in range(len(self.names)) if tier_share[tier].any()]
        worst = used[-1]
        nvlink_s = float(tier_share[0].max() / self.rate[0])
        # Each peer gets an equal part of the bytes, over its own links.
        if self.linked_peers and nvlink_s:
            nvlink_s = self.domain_seconds(n)
        outside = tier_share[1:]
        source = np.broadcast_to(node, outside.shape).reshape(-1)
        level = np.repeat(np.arange(1, len(self.names)), node.size)
        shared_s = self._fullest_link(
            source,
            level,
            outside.reshape(-1),
            int(node.max()) + 1,
        )
        own_nic = sum(
            tier_share[tier] / self._gpu_bandwidth(np.array(tier)) for tier in used if tier
        )
        busiest = np.unravel_index(int(tier_share[worst].argmax()), node.shape)
        hop_s = float(self.latency[worst])
        return Path(
            nvlink_s=nvlink_s,
            fabric_s=max(shared_s, float(np.max(own_nic))),
            hop_s=hop_s,
            ring_latency_s=hop_s * (n - 1),
            worst_level=self.names[worst],
            share={
                self.names[tier]: float(tier_share[tier][busiest])
                for tier in used
                if tier_share[tier][busiest] > 0
            },
            stretch=self.stretch[worst],
        )

    def _tier_shares(self, node: Ints) -> Floats:
        """Returns the fraction of each member's bytes whose ends meet on a tier.

        The result is float [tier, groups, n], and `node` is int [groups, n].
        """
        within = np.stack(
            [_members_in_block(self.block[tier][node]) - 1 for tier in range(len(self.names))]
        )
        shares: Floats = np.diff(within, axis=0, prepend=0.0) / (node.shape[1] - 1)
        return shares

    def _gpu_bandwidth(self, level: Ints) -> Floats:
        """Returns the bytes/s of a GPU that sends alone: a whole NIC, or all of its NICs."""
        return self.rate[level] * max(1.0, 1.0 / self.nics_per_gpu)

    def _fullest_link(
        self,
        source: Ints,
        level: Ints,
        flows: Floats,
        slots: int,
    ) -> float:
        """Returns the seconds per byte on the most loaded shared link.

        Flow i leaves node source[i] and meets its peer on level[i]. Tier by tier, all flows that
        leave a block share the block's uplinks. On tier 0 these are the NICs of an NVLink domain,
        for those of its nodes that are among the `slots` nodes of the job.
        """
        seconds = 0.0
        for tier in range(len(self.names) - 1):
            leaves = level > tier
            if not leaves.any():
                break
            load = np.bincount(
                self.block[tier][source[leaves]],
                weights=flows[leaves],
                minlength=len(self.gpus[tier]),
            )
            gpus = self.gpus[tier]
            if tier == 0:
                gpus = np.bincount(self.block[0][:slots], minlength=len(gpus)) * self.gpus_per_node
            capacity = np.maximum(gpus, 1) * self.rate[max(tier, 1)] / self.oversubscription[tier]
            seconds = max(seconds, float((load / capacity).max()))
        return seconds


def _members_in_block(block: Ints) -> Floats:
    """Counts, per member, the members of its group in the same block, itself included.

    Returns float [groups, n] in O(groups * n log n): sorts each group, counts runs, writes back.
    Most groups are sorted already.
    """
    if bool((block[:, 1:] >= block[:, :-1]).all()):
        first = np.ones(block.shape, dtype=bool)
        np.not_equal(block[:, 1:], block[:, :-1], out=first[:, 1:])
        starts = np.flatnonzero(first)
        sizes = np.diff(starts, append=block.size)
        return np.repeat(sizes.astype(float), sizes).reshape(block.shape)
    order = np.argsort(block, axis=1, kind="stable")
    ordered = np.take_along_axis(block, order, axis=1)
    first = np.ones(ordered.shape, dtype=bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    run = np.cumsum(first.ravel()) - 1
    counts = np.empty(ordered.shape, dtype=float)
    np.put_along_axis(
        counts,
        order,
        np.bincount(run)[run].reshape(ordered.shape).astype(float),
        axis=1,
    )
    return counts
