"""NVLink domains that groups do not divide: which part of each a job uses, and which nodes stay
idle. Pure.

A rack of 72 GPUs holds two expert-parallel groups of 32. A third would straddle two racks and run
at the speed of the network between them, so the job uses 64 of the 72; the other two nodes are
spares. Nodes are used whole.

The ranks that exchange most stay in one domain: tensor-parallel groups always, then expert- and
context-parallel ones where a domain can hold them. Which of pipeline and data parallelism lies
inside, the predicted step decides.
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
    sizes: tuple[tuple[int, int], ...]  # (nodes of a domain, how many such domains)

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * sum(nodes * many for nodes, many in self.sizes)

    @property
    def largest(self) -> int:
        """Nodes of the largest domain."""
        return max(nodes for nodes, _ in self.sizes)

    def unit(self, group: int) -> int:
        """Nodes that one or several whole groups of `group` ranks fill exactly."""
        return lcm(group, self.gpus_per_node) // self.gpus_per_node

    def usable(self, group: int) -> int:
        """GPUs of all domains that groups of `group` ranks can use without straddling two; 0: no
        domain holds one."""
        unit = self.unit(group)
        return self.gpus_per_node * sum(nodes // unit * unit * many for nodes, many in self.sizes)

    def expert_group(self, tp: int, ep: int) -> int:
        """Ranks that must stay in one domain: tp, times ep where a domain can hold that."""
        return tp * ep if self.unit(tp * ep) <= self.largest else tp

    def inner_group(self, tp: int, cp: int, ep: int, pp: int) -> int:
        """The same, times cp where a domain can hold that and one copy of the model still finds
        room."""
        group = self.expert_group(tp, ep)
        fits = (
            self.unit(group * cp) <= self.largest and self.usable(group * cp) >= tp * cp * ep * pp
        )
        return group * cp if fits else group

    def parts(
        self, tp: int, cp: int, ep: int, pp: int, dp: int = 1, across: bool = False
    ) -> dict[int, int]:
        """GPUs that a job may use -> the group that they are whole multiples of; most GPUs first.
        Empty: too few.

        The group is the inner one, or that with a part of the other axes of the model, and of the
        `dp` copies of it. `across`: all GPUs may be used whatever straddles.
        """
        replica = tp * cp * ep * pp
        group = self.inner_group(tp, cp, ep, pp)
        groups_by_gpus = {self.gpus: 1} if across else {}
        rest = replica // group * dp
        for factor in range(1, min(rest, self.largest * self.gpus_per_node) + 1):
            if rest % factor == 0 and (gpus := self.usable(group * factor)) >= replica:
                groups_by_gpus.setdefault(gpus, group * factor)
        return dict(sorted(groups_by_gpus.items(), reverse=True))

    def filled(self, tp: int, cp: int, ep: int, pp: int, across: bool = False) -> int:
        """GPUs that the job uses when dp is left out: the most of `parts` that whole copies of the
        model fill.

        Where they fill none, as many as fit into the first. The whole cluster, which the rules
        refuse then, where that is the first or there is none.
        """
        replica = tp * cp * ep * pp
        sizes = self.parts(tp, cp, ep, pp, across=across)
        filled_gpus = next((gpus for gpus in sizes if gpus % replica == 0), 0)
        largest = max(sizes, default=self.gpus)
        return filled_gpus or (largest // replica * replica if largest < self.gpus else self.gpus)


def domains_of(cluster: Cluster) -> Domains:
    sizes = Counter(map(len, cluster.nvlink_domains))
    return Domains(cluster.gpus_per_node, tuple(sorted(sizes.items())))


def usable_nodes(cluster: Cluster, group: int) -> list[int]:
    """Nodes of the part of each domain that groups of `group` ranks fill, domains in the cluster's
    order."""
    unit = domains_of(cluster).unit(group)
    return [
        node
        for nodes in sorted(cluster.nvlink_domains)
        for node in sorted(nodes)[: len(nodes) // unit * unit]
    ]


def cut(cluster: Cluster, nodes: Iterable[int]) -> Cluster:
    """`cluster` with only these nodes, in their old order."""
    kept_nodes = sorted(nodes)
    new_index = {node: index for index, node in enumerate(kept_nodes)}

    def inside(blocks: list[list[int]]) -> list[list[int]]:
        kept_blocks = ([new_index[node] for node in block if node in new_index] for block in blocks)
        return [block for block in kept_blocks if block]

    return structs.replace(
        cluster,
        node_names=[cluster.node_names[node] for node in kept_nodes],
        nvlink_domains=inside(cluster.nvlink_domains),
        levels=[
            structs.replace(level, switches=inside(level.switches)) for level in cluster.levels
        ],
    )
