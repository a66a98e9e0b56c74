"""Builds the cluster that a plan is placed on, from names and switches. Pure.

A topology knows names, states and which nodes are under which switch, and seldom rates. Those
come from the cluster entry that the user planned with (`cluster=h100x64`): its innermost level
gives the figures of the innermost switches, and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from orchestrator.errors import OrchError
from orchestrator.plan.cluster import NVLINK, SELF, check_cluster
from orchestrator.plan.document import Cluster, SwitchLevel
from orchestrator.plan.exits import Exit

from .model import Tier, Topology

FABRIC = "fabric"  # the level that joins nodes which share no switch of the topology


def with_nodes(
    base: Cluster,
    names: Iterable[str],
    topology: Topology,
    name: str | None = None,
) -> Cluster:
    """Returns `base` with these nodes, in topology order, under the switches of the topology.

    Raises OrchError (65) if the description contradicts itself.
    """
    order = topology.order(names)
    index = {node: i for i, node in enumerate(order)}
    levels: list[SwitchLevel] = []
    for height, tier in enumerate(topology.tiers):
        switches = _grouped(tier.switches.values(), index)
        is_top = height > 0 and height == len(topology.tiers) - 1
        figures = base.levels[-1 if is_top else min(height, len(base.levels) - 1)]
        levels.append(
            _measured(
                tier,
                base,
                figures,
                name=_free_name(tier.name, levels),
                switches=switches,
            )
        )
    if not levels or len(levels[-1].switches) > 1:
        top = structs.replace(
            base.levels[-1],
            name=_free_name(FABRIC, levels),
            switches=[list(range(len(order)))],
        )
        levels.append(top)
    cluster = structs.replace(
        base,
        name=name or base.name,
        node_names=order,
        nvlink_domains=_domains(base, topology, index, levels[0]),
        levels=levels,
    )
    if problem := check_cluster(cluster):
        raise OrchError(f"the cluster with this topology: {problem}", Exit.CONFIG)
    return cluster


def _measured(
    tier: Tier,
    base: Cluster,
    figures: SwitchLevel,
    **values: object,
) -> SwitchLevel:
    """Returns the base's figures, replaced by those that the network reports about itself."""
    if tier.gbit_per_s:
        values["bytes_per_s"] = tier.gbit_per_s * 1e9 / 8 * base.nics_per_node / base.gpus_per_node
        values["source"] = "link width and speed as discovered"
    if tier.oversubscription:
        values["oversubscription"] = max(1.0, tier.oversubscription)
    return structs.replace(figures, **values)


def _grouped(groups: Iterable[Sequence[str]], index: dict[str, int]) -> list[list[int]]:
    """Returns index lists of the chosen nodes, in node order; nodes that the topology leaves out
    form a group of their own."""
    indices = [sorted(index[node] for node in group if node in index) for group in groups]
    listed = {node for group in indices for node in group}
    rest = [i for i in index.values() if i not in listed]
    return sorted(group for group in (*indices, rest) if group)


def _free_name(name: str, levels: Sequence[SwitchLevel]) -> str:
    used = {NVLINK, SELF, *(level.name for level in levels)}
    while name in used:
        name += "_"
    return name


def _domains(
    base: Cluster,
    topology: Topology,
    index: dict[str, int],
    inner: SwitchLevel,
) -> list[list[int]]:
    """Returns the NVLink domains: those that the topology names; else single nodes; else, on
    rack-scale systems, Slurm's blocks or runs of nodes under one switch."""
    if topology.domains:
        domains = [
            sorted(index[node] for node in nodes if node in index)
            for nodes in topology.domains.values()
        ]
        inside = {node for group in domains for node in group}
        single_nodes = [[i] for i in index.values() if i not in inside]
        return sorted(group for group in [*domains, *single_nodes] if group)
    size = max(len(domain) for domain in base.nvlink_domains)
    if size == 1:
        return [[i] for i in range(len(index))]
    if topology.kind == "block":
        return _grouped(topology.tiers[0].switches.values(), index)
    return [group[i : i + size] for group in inner.switches for i in range(0, len(group), size)]


def choose_nodes(free: Iterable[str], topology: Topology, count: int) -> list[str]:
    """Chooses the `count` free nodes that are closest together: the lowest switch that has enough
    of them, fullest parts first.

    Slurm decides in the end; its tree plugin prefers the fewest leaf switches too. Raises
    OrchError (76) if too few are free.
    """
    free = topology.order(free)
    if count > len(free):
        raise OrchError(f"{count} nodes are wanted, {len(free)} are free", Exit.CAPACITY)
    pool = set(free)
    for height, tier in enumerate(topology.tiers):
        groups = [[n for n in nodes if n in pool] for nodes in tier.switches.values()]
        sufficient = [group for group in groups if len(group) >= count]
        if sufficient:
            return topology.order(_fill(topology, height, min(sufficient, key=len), count))
    return topology.order(_fill(topology, len(topology.tiers), free, count))


def _fill(
    topology: Topology,
    height: int,
    pool: Sequence[str],
    count: int,
) -> list[str]:
    """Chooses `count` of the nodes of one switch at `height`, taking whole sub-switches first,
    the largest first."""
    if height == 0 or count == len(pool):
        return list(pool)[:count]
    inside = set(pool)
    groups = [
        [n for n in nodes if n in inside] for nodes in topology.tiers[height - 1].switches.values()
    ]
    listed = {node for group in groups for node in group}
    groups.append([node for node in pool if node not in listed])
    chosen: list[str] = []
    for group in sorted(filter(None, groups), key=len, reverse=True):
        room = count - len(chosen)
        if len(group) <= room:
            chosen += group
    # The remaining nodes come from the smallest group that has enough of them, else from several.
    while len(chosen) < count:
        room = count - len(chosen)
        chosen_set = set(chosen)
        remaining = [[n for n in group if n not in chosen_set] for group in groups]
        remaining = [group for group in remaining if group]
        sufficient = [group for group in remaining if len(group) >= room]
        group = min(sufficient, key=len) if sufficient else max(remaining, key=len)
        chosen += _fill(topology, height - 1, group, min(room, len(group)))
    return chosen
