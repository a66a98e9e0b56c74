"""Rank mapping: the plan that runs, from the planned one and the nodes that the pods were really
placed on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from orchestrator.cluster.model import FLAT, Tier, Topology
from orchestrator.cluster.nodes import with_nodes
from orchestrator.plan import Plan

if TYPE_CHECKING:
    from orchestrator.planner.elastic.replan import Difference

    from .rendezvous import Join  # imports asyncio, which only pods need


class RankMapping(Struct, frozen=True):
    plan: Plan
    names: list[str]  # of the plan's nodes, in order of the pods' indices
    difference: Difference


def node_names(members: Sequence[Join]) -> list[str]:
    """What the plan calls each pod's share of a node: the Node's name; where pods share one,
    `<node>.pod-<index>`."""
    count = Counter(pod.node for pod in members)
    return [pod.node if count[pod.node] == 1 else f"{pod.node}.pod-{pod.index}" for pod in members]


def map_ranks(
    planned: Plan,
    members: Sequence[Join],
    topology: Topology | None,
    names: Sequence[str] | None = None,
) -> RankMapping:
    """The plan on the nodes of these pods, sealed. The same members give the same plan, to the bit,
    in every pod.

    `names`: what the plan calls their nodes, None: `node_names`.

    OrchError: 65 when the topology contradicts itself, 76 when the pods are too few.
    """
    from orchestrator.planner.elastic.replan import (
        difference,
        replan,
    )  # numpy, which only pods need

    names = node_names(members) if names is None else list(names)
    real = replan(
        planned, with_nodes(planned.cluster, names, pod_topology(topology or FLAT, members, names))
    )
    return RankMapping(real, names, difference(planned, real))


def pod_topology(topology: Topology, members: Sequence[Join], names: Sequence[str]) -> Topology:
    """The topology with each node replaced by the pods on it; pods that share a node are
    closest."""
    on: dict[str, list[str]] = {}
    for pod, name in zip(members, names, strict=True):
        on.setdefault(pod.node, []).append(name)

    def pods_on(nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for node in nodes for name in on.get(node, ()))

    tiers = [
        structs.replace(
            tier,
            switches={k: found for k, nodes in tier.switches.items() if (found := pods_on(nodes))},
        )
        for tier in topology.tiers
    ]
    if len(on) < len(names) and len(on) > 1:
        tiers.insert(0, Tier("host", {node: tuple(pods) for node, pods in sorted(on.items())}))
    domains = {
        key: found for key, nodes in topology.domains.items() if len(found := pods_on(nodes)) > 1
    }
    kind = topology.kind if topology.tiers else ("tree" if tiers else "flat")
    return structs.replace(topology, kind=kind, tiers=tuple(tiers), domains=domains, machines={})
