"""From the pods that came to the plan that runs: pure. `gather` has found them, `task` writes the result down."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, structs

from orchestrator.cluster.fit import fit
from orchestrator.cluster.model import FLAT, Tier, Topology
from orchestrator.plan import Plan
from orchestrator.run.untrusted import UNREADABLE

if TYPE_CHECKING:
    from orchestrator.planner.elastic.replan import Difference

    from .rendezvous import Here  # asyncio with it: who submits has no use for that


class Seating(Struct, frozen=True):
    plan: Plan
    names: list[str]  # of the plan's nodes, in order of the pods' indices
    difference: Difference


def node_names(members: Sequence[Here]) -> list[str]:
    """What the plan calls each pod's share of a node: the Node's name; where pods share one, `<node>.pod-<index>`."""
    count = Counter(here.node for here in members)
    return [here.node if count[here.node] == 1 else f"{here.node}.pod-{here.index}" for here in members]


def seat(planned: Plan, members: Sequence[Here], topology: Topology | None) -> Seating:
    """The plan on the nodes of these pods, sealed. The same members give the same plan, to the bit, in every pod.

    OrchError: 65 when the topology contradicts itself, 76 when the pods are too few.
    """
    from orchestrator.planner.elastic.replan import difference, replan  # numpy, which only pods need

    names = node_names(members)
    real = replan(planned, fit(planned.cluster, names, shared(topology or FLAT, members, names)))
    return Seating(real, names, difference(planned, real))


def shared(topology: Topology, members: Sequence[Here], names: Sequence[str]) -> Topology:
    """The topology with each node replaced by the pods on it; pods that share a node are closest."""
    on: dict[str, list[str]] = {}
    for here, name in zip(members, names, strict=True):
        on.setdefault(here.node, []).append(name)

    def there(nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for node in nodes for name in on.get(node, ()))

    tiers = [
        structs.replace(tier, switches={k: found for k, nodes in tier.switches.items() if (found := there(nodes))})
        for tier in topology.tiers
    ]
    if len(on) < len(names) and len(on) > 1:
        tiers.insert(0, Tier("host", {node: tuple(pods) for node, pods in sorted(on.items())}))
    domains = {key: found for key, nodes in topology.domains.items() if len(found := there(nodes)) > 1}
    kind = topology.kind if topology.tiers else ("tree" if tiers else "flat")
    return structs.replace(topology, kind=kind, tiers=tuple(tiers), domains=domains, machines={})


def pack_topology(topology: Topology) -> bytes:
    """Names and switches alone: what machines have and whether they are free is of yesterday when pods read it."""
    return zlib.compress(msgspec.json.encode(structs.replace(topology, machines={}), order="deterministic"), 9)


def unpack_topology(raw: bytes) -> Topology | None:
    """None for what is no topology: a run can do without."""
    try:
        return msgspec.json.decode(zlib.decompressobj().decompress(raw, 1 << 28), type=Topology)
    except (zlib.error, *UNREADABLE):
        return None
