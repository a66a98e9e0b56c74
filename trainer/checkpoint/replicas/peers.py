"""Peer assignment: which rank keeps whose replica. Pure functions of the plan, equal on every
rank."""

from __future__ import annotations

from orchestrator.plan import Plan


def nodes_of(plan: Plan) -> dict[str, list[int]]:
    """Maps each node that has ranks to them, ascending, in the plan's node order."""
    ranks_of: dict[str, list[int]] = {name: [] for name in plan.cluster.node_names}
    for placement in plan.ranks:
        ranks_of[placement.node].append(placement.rank)
    return {name: ranks for name, ranks in ranks_of.items() if ranks}


def ring_distance(plan: Plan) -> int:
    """Returns how many nodes further in a ring a node's peer is: the smallest distance at which no
    node shares an innermost switch with its peer, or 1 if there is none."""
    names = list(nodes_of(plan))
    index = {name: position for position, name in enumerate(plan.cluster.node_names)}
    switches = plan.cluster.levels[0].switches if plan.cluster.levels else []
    switch_of = {
        plan.cluster.node_names[node]: number
        for number, members in enumerate(switches)
        for node in members
    }
    switch_ids = [switch_of.get(name, index[name]) for name in names]
    for distance in range(1, len(names)):
        peer_ids = switch_ids[distance:] + switch_ids[:distance]
        if all(switch != peer for switch, peer in zip(switch_ids, peer_ids, strict=True)):
            return distance
    return 1


def assign_peers(plan: Plan) -> dict[int, int]:
    """Maps each rank to the rank on another node that keeps its replica; empty with a single node.

    The ranks of a node are dealt in turn to the ranks of its peer node, so with unequal nodes a
    rank may keep several replicas or none.
    """
    nodes = list(nodes_of(plan).values())
    if len(nodes) < 2:
        return {}
    distance = ring_distance(plan)
    peer_of: dict[int, int] = {}
    for position, ranks in enumerate(nodes):
        peer_ranks = nodes[(position + distance) % len(nodes)]
        peer_of |= {rank: peer_ranks[number % len(peer_ranks)] for number, rank in enumerate(ranks)}
    return peer_of
