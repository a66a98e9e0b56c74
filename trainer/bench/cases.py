"""The cases of `orch bench`: groups of ranks on one network tier, operations, message sizes.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from orchestrator.plan import Plan

#: The trainer's own collectives, as `orchestrator.cost.time.collective` names and counts them.
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
SIZES = (4 << 10, 64 << 10, 512 << 10, 2 << 20)  # bytes of the whole tensor; p2p: of one message


class Case(Struct, frozen=True):
    """Groups that run the same operations at the same time."""

    #: tier that connects the group's neighbours: "nvlink" (inside one domain) or a switch level
    level: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks of the largest group."""
        return max(map(len, self.groups))


def cases(plan: Plan) -> list[Case]:
    """Returns the cases of a plan. Inside NVLink domains: pairs, and all ranks. On each switch
    level: pairs of nodes that it connects, and one node of every block below a switch. Equal local
    ranks of those nodes run at once, since they share their nodes' links.
    """
    cluster = plan.cluster
    index = {name: i for i, name in enumerate(cluster.node_names)}
    by_node: list[list[int]] = [[] for _ in cluster.node_names]
    for rank in plan.ranks:
        by_node[index[rank.node]].append(rank.rank)
    domains = [
        [rank for node in domain for rank in by_node[node]] for domain in cluster.nvlink_domains
    ]
    pairs = tuple(pair for domain in domains for pair in list(pairwise(domain))[::2])
    candidates = [
        Case("nvlink", pairs),
        Case("nvlink", tuple(tuple(domain) for domain in domains)),
    ]
    below: Sequence[Sequence[int]] = cluster.nvlink_domains
    for level in cluster.levels:
        for most_nodes in (2, len(below)):
            groups: list[tuple[int, ...]] = []
            for switch in level.switches:
                first_nodes = [block[0] for block in below if block[0] in switch]
                nodes = [node for node in first_nodes if by_node[node]][:most_nodes]
                if len(nodes) > 1:
                    groups += zip(*(by_node[node] for node in nodes), strict=False)
            candidates.append(Case(level.name, tuple(groups)))
        below = level.switches
    distinct = dict.fromkeys(case for case in candidates if case.groups and case.ranks > 1)
    return [Case(case.level, tuple(g for g in case.groups if len(g) > 1)) for case in distinct]
