"""Naive twin of where experts' tokens travel: ranks one by one, pairs of them one by one."""

from __future__ import annotations

from collections import Counter

from orchestrator.plan.document import Cluster, Parallel
from orchestrator.plan.ranks import coords, degrees
from tests.reference.fabric_twin import meet


def groups_of_experts(parallel: Parallel, order) -> list[list[int]]:
    """Ranks that hold different experts of one layer and tell each other's tokens: equal in every
    coordinate that does not tell experts apart."""
    etp = parallel.etp if isinstance(parallel.etp, int) else parallel.tp
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(coords(order, degrees(parallel))):
        key = (at["pp"], at["dp"], at["tp"] % etp, 0 if parallel.fold_cp is True else at["cp"])
        members.setdefault(key, []).append(rank)
    return list(members.values())


def peers_by_level(cluster: Cluster, parallel: Parallel, order, nodes) -> list[Counter]:
    """Counts, for each rank, the ranks that it sends tokens to by the name of the level on which
    they meet. `nodes`: the node in each slot."""
    names = ["nvlink", *(level.name for level in cluster.levels)]
    per_node = cluster.gpus_per_node
    result = {}
    for group in groups_of_experts(parallel, order):
        for rank in group:
            peer_nodes = (nodes[peer // per_node] for peer in group if peer != rank)
            result[rank] = Counter(
                names[meet(cluster, nodes[rank // per_node], node)] for node in peer_nodes
            )
    return [result[rank] for rank in sorted(result)]
