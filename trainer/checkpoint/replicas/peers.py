"""Who keeps a copy for whom: pure functions of the plan, the same on every rank."""

from __future__ import annotations

from orchestrator.plan import Plan


def nodes_of(plan: Plan) -> dict[str, list[int]]:
    """Node -> its ranks ascending, in the plan's order of nodes; only nodes that have ranks."""
    found: dict[str, list[int]] = {name: [] for name in plan.cluster.node_names}
    for place in plan.ranks:
        found[place.node].append(place.rank)
    return {name: ranks for name, ranks in found.items() if ranks}


def shift(plan: Plan) -> int:
    """A node's copies are kept by the node this many places on, in a ring: the nearest one such that no node and its
    keeper are under one innermost switch, or the next one where that cannot be."""
    names = list(nodes_of(plan))
    index = {name: at for at, name in enumerate(plan.cluster.node_names)}
    switch = {
        plan.cluster.node_names[node]: number
        for number, members in enumerate(plan.cluster.levels[0].switches if plan.cluster.levels else [])
        for node in members
    }
    places = [switch.get(name, index[name]) for name in names]
    for distance in range(1, len(names)):
        if all(place != places[(at + distance) % len(names)] for at, place in enumerate(places)):
            return distance
    return 1


def wards(plan: Plan) -> dict[int, int]:
    """Rank -> the rank on another node that keeps its copy. Empty on one node: there is nobody else.

    Ranks of a node go to the ranks of the keeping node in turn, so a keeper may serve several or none where nodes have
    unequally many ranks.
    """
    nodes = list(nodes_of(plan).values())
    if len(nodes) < 2:
        return {}
    distance = shift(plan)
    keepers = {}
    for at, ranks in enumerate(nodes):
        other = nodes[(at + distance) % len(nodes)]
        keepers |= {rank: other[number % len(other)] for number, rank in enumerate(ranks)}
    return keepers
