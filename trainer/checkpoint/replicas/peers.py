"""Peer assignment: which rank keeps whose replica. Pure functions of the plan, equal on every
rank."""

from __future__ import annotations

from orchestrator.plan import Plan


def nodes_of(plan: Plan) -> dict[str, list[int]]:
    """Node -> its ranks ascending, in the plan's node order; only nodes that have ranks."""
    found: dict[str, list[int]] = {name: [] for name in plan.cluster.node_names}
    for place in plan.ranks:
        found[place.node].append(place.rank)
    return {name: ranks for name, ranks in found.items() if ranks}


def ring_distance(plan: Plan) -> int:
    """A node's peer is this many nodes further in a ring: the smallest distance at which no node
    shares an innermost switch with its peer, 1 if there is none."""
    names = list(nodes_of(plan))
    index = {name: at for at, name in enumerate(plan.cluster.node_names)}
    switch = {
        plan.cluster.node_names[node]: number
        for number, members in enumerate(
            plan.cluster.levels[0].switches if plan.cluster.levels else []
        )
        for node in members
    }
    places = [switch.get(name, index[name]) for name in names]
    for distance in range(1, len(names)):
        if all(place != places[(at + distance) % len(names)] for at, place in enumerate(places)):
            return distance
    return 1


def assign_peers(plan: Plan) -> dict[int, int]:
    """Rank -> the rank on another node that keeps its replica; empty with a single node.

    The ranks of a node are dealt in turn to the ranks of its peer node, so with unequal nodes a
    rank may keep several replicas or none.
    """
    nodes = list(nodes_of(plan).values())
    if len(nodes) < 2:
        return {}
    distance = ring_distance(plan)
    peer_of: dict[int, int] = {}
    for at, ranks in enumerate(nodes):
        other = nodes[(at + distance) % len(nodes)]
        peer_of |= {rank: other[number % len(other)] for number, rank in enumerate(ranks)}
    return peer_of
