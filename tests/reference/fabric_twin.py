"""Naive twin of `orchestrator.cost.time.fabric`: every hop and every link one by one, in plain
Python.

Also of the group algebra: groups found by comparing all pairs of ranks.
"""

from __future__ import annotations

from collections import Counter

from orchestrator.plan.document import Cluster


def groups_by_pairs(coords: list[dict[str, int]], varying: tuple[str, ...]) -> set[frozenset[int]]:
    """Ranks belong together when they agree on every axis that does not vary."""
    result = set()
    for own_coord in coords:
        members = [
            r
            for r, c in enumerate(coords)
            if all(c[a] == own_coord[a] for a in own_coord if a not in varying)
        ]
        result.add(frozenset(members))
    return result


def tiers(cluster: Cluster) -> list[list[list[int]]]:
    return [cluster.nvlink_domains, *(level.switches for level in cluster.levels)]


def meet(cluster: Cluster, a: int, b: int) -> int:
    """Lowest tier with a block that holds both nodes."""
    return next(
        t
        for t, blocks in enumerate(tiers(cluster))
        if any(a in block and b in block for block in blocks)
    )


def block_of(cluster: Cluster, tier: int, node: int) -> int:
    return next(i for i, block in enumerate(tiers(cluster)[tier]) if node in block)


def seconds_per_byte(
    cluster: Cluster, groups: list[list[int]], pattern: str, wrap: bool = True
) -> tuple[float, float, int]:
    """(seconds on NVLink, on the network, per byte that a rank sends, worst tier) when all groups
    run `pattern`."""
    rate = [cluster.nvlink.bytes_per_s, *(level.bytes_per_s for level in cluster.levels)]
    gpus = cluster.gpus_per_node
    own_nic = max(1.0, gpus / cluster.nics_per_node)
    load: Counter = Counter()  # (tier, block) -> bytes that leave the block upwards
    nvlink = 0.0
    slowest = 0.0
    worst = 0
    for group in groups:
        n = len(group)
        for i, rank in enumerate(group):
            if pattern == "exchange":
                peers = [(member, 1 / (n - 1)) for member in group if member != rank]
            elif i + 1 < n or wrap:
                peers = [(group[(i + 1) % n], 1.0)]
            else:
                peers = []
            node = rank // gpus
            outside = 0.0
            inside = 0.0
            for peer, share in peers:
                tier = meet(cluster, node, peer // gpus)
                worst = max(worst, tier)
                if tier == 0:
                    inside += share
                    continue
                for below in range(tier):
                    load[below, block_of(cluster, below, node)] += share
                lanes = 1
                if pattern == "ring":
                    home = block_of(cluster, 0, node)
                    lanes = sum(block_of(cluster, 0, member // gpus) == home for member in group)
                outside += share / (rate[tier] * own_nic * lanes)
            near = [share for peer, share in peers if meet(cluster, node, peer // gpus) == 0]
            if (
                cluster.direct_nvlink is True and near
            ):  # a third of the links to each of three others
                home = block_of(cluster, 0, node)
                there = sum(block_of(cluster, 0, member // gpus) == home for member in group)
                inside = max(near) * (gpus - 1) / (there - 1 if pattern == "ring" else 1)
            nvlink = max(nvlink, inside / rate[0])
            slowest = max(slowest, outside)
    for (tier, block), size in load.items():
        over = cluster.levels[tier - 1].oversubscription if tier else 1.0
        capacity = len(tiers(cluster)[tier][block]) * gpus * rate[max(tier, 1)] / over
        slowest = max(slowest, size / capacity)
    return nvlink, slowest, worst
