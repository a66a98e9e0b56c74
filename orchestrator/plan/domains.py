"""Chooses the part of each NVLink domain that a job uses if groups do not divide the domains. Pure.

A rack of 72 GPUs holds two expert-parallel groups of 32. A third group would straddle two racks and
run at the speed of the network between them, so the job uses 64 of the 72 GPUs; the other two nodes
are spares. A node is used as a whole or not at all.

The ranks that exchange most data stay in one domain: tensor-parallel groups always, then expert-
and context-parallel groups if a domain can hold them. The predicted step decides whether pipeline
or data parallelism is inside a domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import lcm
from typing import NamedTuple

from msgspec import structs

from .document import Cluster


class Domains(NamedTuple):
    """The NVLink domains of a cluster by size."""

    gpus_per_node: int
    sizes: tuple[tuple[int, int], ...]  # (nodes of a domain, number of such domains)

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * sum(nodes * count for nodes, count in self.sizes)

    @property
    def largest(self) -> int:
        """The number of nodes of the largest domain."""
        return max(nodes for nodes, _ in self.sizes)

    def unit(self, group: int) -> int:
        """The smallest number of nodes that whole groups of `group` ranks fill exactly."""
        return lcm(group, self.gpus_per_node) // self.gpus_per_node

    def usable(self, group: int) -> int:
        """The number of GPUs that groups of `group` ranks can use without straddling two domains; 0
        if no domain holds a group."""
        unit = self.unit(group)
        nodes_used = sum(nodes // unit * unit * count for nodes, count in self.sizes)
        return self.gpus_per_node * nodes_used

    def expert_group(self, tp: int, ep: int) -> int:
        """The number of ranks that must stay in one domain: tp, or tp * ep if a domain can hold
        that."""
        return tp * ep if self.unit(tp * ep) <= self.largest else tp

    def inner_group(self, tp: int, cp: int, ep: int, pp: int) -> int:
        """The expert group, times cp if a domain can hold that and the domains can still hold one
        copy of the model."""
        group = self.expert_group(tp, ep)
        fits = (
            self.unit(group * cp) <= self.largest and self.usable(group * cp) >= tp * cp * ep * pp
        )
        return group * cp if fits else group

    def parts(
        self,
        tp: int,
        cp: int,
        ep: int,
        pp: int,
        dp: int = 1,
        across: bool = False,
    ) -> dict[int, int]:
        """Maps each number of GPUs that a job may use to the group of which it is a multiple,
        largest first. Empty if the domains have too few GPUs.

        The group is the inner group, or the inner group times a factor of the model's other axes
        and its `dp` copies. `across` also allows all GPUs, with groups that straddle domains.
        """
        replica = tp * cp * ep * pp
        group = self.inner_group(tp, cp, ep, pp)
        groups_by_gpus = {self.gpus: 1} if across else {}
        rest = replica // group * dp
        for factor in range(1, min(rest, self.largest * self.gpus_per_node) + 1):
            if rest % factor == 0 and (gpus := self.usable(group * factor)) >= replica:
                groups_by_gpus.setdefault(gpus, group * factor)
        return dict(sorted(groups_by_gpus.items(), reverse=True))

    def filled(
        self,
        tp: int,
        cp: int,
        ep: int,
        pp: int,
        across: bool = False,
    ) -> int:
        """The number of GPUs that a job without `dp` uses: the largest of `parts` that whole copies
        of the model fill.

        If they fill none, it is the number of GPUs of the copies that fit into the largest part. If
        that part is the whole cluster or there is none, it is the whole cluster, which the rules of
        `supported` then refuse.
        """
        replica = tp * cp * ep * pp
        sizes = self.parts(tp, cp, ep, pp, across=across)
        for gpus in sizes:
            if gpus % replica == 0:
                return gpus
        largest = max(sizes, default=self.gpus)
        if largest < self.gpus:
            return largest // replica * replica
        return self.gpus


def domains_of(cluster: Cluster) -> Domains:
    sizes = Counter(map(len, cluster.nvlink_domains))
    return Domains(cluster.gpus_per_node, tuple(sorted(sizes.items())))


def usable_nodes(cluster: Cluster, group: int) -> list[int]:
    """Lists the nodes of each domain that groups of `group` ranks fill, domain by domain in the
    cluster's order."""
    unit = domains_of(cluster).unit(group)
    usable = list[int]()
    for nodes in sorted(cluster.nvlink_domains):
        count = len(nodes) // unit * unit
        usable += sorted(nodes)[:count]
    return usable


def cut(cluster: Cluster, nodes: Iterable[int]) -> Cluster:
    """Reduces `cluster` to these nodes, in their old order."""
    kept_nodes = sorted(nodes)
    new_index = {node: index for index, node in enumerate(kept_nodes)}

    def inside(blocks: list[list[int]]) -> list[list[int]]:
        kept_blocks = ([new_index[node] for node in block if node in new_index] for block in blocks)
        return [block for block in kept_blocks if block]

    levels = [structs.replace(level, switches=inside(level.switches)) for level in cluster.levels]
    return structs.replace(
        cluster,
        node_names=[cluster.node_names[node] for node in kept_nodes],
        nvlink_domains=inside(cluster.nvlink_domains),
        levels=levels,
    )
