"""Rank mapping: the plan that runs, computed from the planned one and the nodes that the pods are
really on. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    names: list[str]  # names of the plan's nodes, in order of the pods' indices
    difference: Difference


def node_names(members: Sequence[Join]) -> list[str]:
    """Returns the plan's name of each pod's share of a node: the Node's name, or
    `<node>.pod-<index>` if pods share it."""
    count = Counter(pod.node for pod in members)
    return [pod.node if count[pod.node] == 1 else f"{pod.node}.pod-{pod.index}" for pod in members]


def map_ranks(
    planned: Plan,
    members: Sequence[Join],
    topology: Topology | None,
    names: Sequence[str] | None = None,
) -> RankMapping:
    """Returns the plan on the nodes of these pods, sealed. The same members give the same plan, to
    the bit, in every pod.

    `names`: the plan's names of their nodes; None: `node_names`.

    OrchError: 65 if the topology contradicts itself, 76 if the pods are too few.
    """
    # numpy, which only pods need
    from orchestrator.planner.elastic.replan import difference, replan

    names = node_names(members) if names is None else list(names)
    network = pod_topology(topology or FLAT, members, names)
    real = replan(planned, with_nodes(planned.cluster, names, network))
    return RankMapping(real, names, difference(planned, real))


def pod_topology(
    topology: Topology,
    members: Sequence[Join],
    names: Sequence[str],
) -> Topology:
    """Returns the topology with each node replaced by the pods on it; pods on one node are
    closest."""
    by_node: dict[str, list[str]] = {}
    for pod, name in zip(members, names, strict=True):
        by_node.setdefault(pod.node, []).append(name)

    def on_pods(sets: Mapping[str, Sequence[str]], least: int) -> dict[str, tuple[str, ...]]:
        """Replaces nodes by their pods in each set, and drops sets of fewer than `least` pods."""
        replaced = {
            key: tuple(name for node in nodes for name in by_node.get(node, ()))
            for key, nodes in sets.items()
        }
        return {key: pods for key, pods in replaced.items() if len(pods) >= least}

    tiers = [structs.replace(tier, switches=on_pods(tier.switches, 1)) for tier in topology.tiers]
    if 1 < len(by_node) < len(names):
        hosts = {node: tuple(pods) for node, pods in sorted(by_node.items())}
        tiers.insert(0, Tier("host", hosts))
    domains = on_pods(topology.domains, 2)
    kind = topology.kind
    if not topology.tiers:
        kind = "tree" if tiers else "flat"
    return structs.replace(
        topology,
        kind=kind,
        tiers=tuple(tiers),
        domains=domains,
        machines={},
    )
