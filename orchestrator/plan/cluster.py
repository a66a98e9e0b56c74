"""Names the tiers and communication operations of a plan's cluster, and checks its consistency."""

from __future__ import annotations

from typing import Literal

from .document import Cluster

NVLINK = "nvlink"  # the tier of NVLink domains, below all switches
SELF = "self"  # the tier of a group with one GPU

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


def check_cluster(cluster: Cluster) -> str | None:
    """Checks names, partitions, nesting and a common top level. Returns one line on the first
    contradiction, or None.

    Nesting makes "the level where two nodes meet" well defined: two nodes under one switch share a
    switch on every level above.
    """
    nodes = len(cluster.node_names)
    seen: set[str] = set()
    for name in cluster.node_names:
        if name in seen:
            return f"node {name!r} is named twice"
        seen.add(name)
    names = [level.name for level in cluster.levels]
    for name in names:
        if name in (NVLINK, SELF) or names.count(name) > 1:
            return (
                f"level name {name!r} is taken (names must differ, and {NVLINK!r} and {SELF!r} are"
                " reserved)"
            )
    tiers = [
        (NVLINK, cluster.nvlink_domains),
        *((level.name, level.switches) for level in cluster.levels),
    ]
    below: tuple[str, list[list[int]]] | None = None
    for name, blocks in tiers:
        owner: dict[int, int] = {}
        for index, block in enumerate(blocks):
            for node in block:
                if not 0 <= node < nodes:
                    return f"{name} block {index} lists node {node}, the nodes are 0..{nodes - 1}"
                if node in owner:
                    return f"node {node} is in {name} blocks {owner[node]} and {index}"
                owner[node] = index
        if len(owner) != nodes:
            missing = next(node for node in range(nodes) if node not in owner)
            return f"node {missing} is in no {name} block"
        if below is not None:
            for index, block in enumerate(below[1]):
                if len({owner[node] for node in block}) > 1:
                    return (
                        f"{below[0]} block {index} is split over several {name} switches: levels"
                        " must nest"
                    )
        below = name, blocks
    if cluster.direct_nvlink is True and max(map(len, cluster.nvlink_domains)) > 1:
        return (
            "an NVLink domain of several nodes has a switch: nvlink.switched=false wants"
            " nvlink.domain_nodes=1"
        )
    if nodes > 1 and len(tiers[-1][1]) != 1:
        return (
            f"nodes meet nowhere: the last level, {tiers[-1][0]}, has {len(tiers[-1][1])} blocks"
            " and must have one"
        )
    return None
