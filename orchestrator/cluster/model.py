"""The model of a network: machines, NVLink domains and tiers of switches, all by name. Pure.

Every importer ends here and everything else starts here, so a rack is the same thing whether
Slurm, Kubernetes or the subnet manager described it. Membership may be ragged; machines may
differ and may be out of service.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .hostlist import natural_key

Kind = Literal["tree", "block", "flat"]
SHARED = "shared GPUs"
MIG = "MIG slices"  # reasons: what a node advertises are not whole GPUs
#: The innermost tier of a block topology; the names of further tiers end with their size.
BLOCK = "block"
MAX_DEPTH = 64  # switches above one another; no network is that deep


ONLY_SLICES = "without a whole GPU, slices only"  # a machine's reason
NO_GPUS = "without GPUs"  # a machine's reason
#: Reason why a machine has no whole GPUs for a job -> the phrase that describes such a node.
GPU_REASONS = {
    SHARED: f"with {SHARED}",
    MIG: f"with {MIG}",
    ONLY_SLICES: ONLY_SLICES,
    NO_GPUS: NO_GPUS,
}


class GpuCount(Struct, frozen=True):
    """A number of GPUs of one model ("": its name is unknown)."""

    gpus: int
    gpu: str


class Machine(Struct, frozen=True, kw_only=True):
    """The known hardware of one node; 0 and "" are unknown."""

    gpus: int = 0
    gpu: str = ""
    other_gpus: tuple[GpuCount, ...] = ()  # GPUs of further models, not counted in `gpus`
    nics: int = 0
    free: bool = True  # may take a job
    reason: str = ""  # why not


class Tier(Struct, frozen=True):
    name: str
    switches: dict[str, tuple[str, ...]]  # switch (or block) -> names of all nodes below it
    gbit_per_s: float = 0.0  # rate of one port; 0 = unknown
    oversubscription: float = 0.0  # bandwidth below / bandwidth upwards; 0 = unknown


class Topology(Struct, frozen=True):
    kind: Kind
    tiers: tuple[Tier, ...]  # innermost first; empty when flat
    #: nodes of one base block, as Slurm counts them for --segment; 0 unless kind is block
    block_size: int = 0
    name: str = ""
    #: NVLink domains of several nodes; a node in none is its own domain
    domains: dict[str, tuple[str, ...]] = {}
    machines: dict[str, Machine] = {}

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Returns Slurm's BlockSizes: the nodes of a base block, then of a block of each further
        tier. () if they are unknown."""
        sizes = [tier.name.removeprefix(BLOCK) for tier in self.tiers[1:]]
        is_known = all(size.isdecimal() for size in sizes)
        if self.kind != "block" or not self.block_size or not is_known:
            return ()
        return (self.block_size, *map(int, sizes))

    def order(self, nodes: Iterable[str]) -> list[str]:
        """Sorts nodes so that those under one switch are neighbours, on every tier; otherwise in
        natural order."""
        groups = [tier.switches for tier in reversed(self.tiers)]
        if self.domains:
            groups.append(self.domains)
        paths = [
            {node: index for index, name in enumerate(group) for node in group[name]}
            for group in groups
        ]
        last = max((len(group) for group in groups), default=0)

        def key(node: str) -> tuple[Any, ...]:
            return [path.get(node, last) for path in paths], natural_key(node)

        return sorted(nodes, key=key)

    @property
    def nodes(self) -> list[str]:
        """Returns every node that anything names, in topology order."""
        named: dict[str, None] = dict.fromkeys(self.machines)
        for group in [*(tier.switches for tier in self.tiers[:1]), self.domains]:
            for members in group.values():
                named.update(dict.fromkeys(members))
        return self.order(named)

    @property
    def free(self) -> list[str]:
        """Returns the nodes that may take a job: all that are not out of service."""
        return [
            node for node in self.nodes if node not in self.machines or self.machines[node].free
        ]


FLAT = Topology("flat", ())


def check(topology: Topology, source: str) -> Topology:
    """Returns the topology if every node is under at most one switch of a tier and tiers nest.
    Raises OrchError (65)."""
    below: tuple[str, Mapping[str, tuple[str, ...]]] | None = (
        ("domain", topology.domains) if topology.domains else None
    )
    for tier in topology.tiers:
        owner: dict[str, str] = {}
        for switch, nodes in tier.switches.items():
            for node in nodes:
                if node in owner:
                    both = f"{owner[node]} and {switch}"
                    raise bad(source, f"node {node} is under two {tier.name} switches, {both}")
                owner[node] = switch
        lower, groups = below or ("", {})
        for name, nodes in groups.items():
            above = {owner.get(node) for node in nodes}
            if len(above) > 1:
                example = ", ".join(sorted(str(switch) for switch in above)[:2])
                switches = f"several {tier.name} switches ({example})"
                raise bad(source, f"{lower} {name} is split over {switches}")
        below = tier.name, tier.switches
    return topology


def from_paths(
    paths: Mapping[str, tuple[str, ...]],
    names: Iterable[str],
    kind: Kind = "tree",
) -> tuple[Kind, tuple[Tier, ...]]:
    """Builds (kind, tiers) from each node's switches, coarse to fine, all of one length. `names`:
    names of the tiers, coarse first.

    A switch keeps its own name; if two parents have a switch of that name, it gets its whole
    path.
    """
    labels = list(names)
    tiers = []
    for depth in range(len(labels), 0, -1):
        full: dict[tuple[str, ...], list[str]] = {}
        for node in sorted(paths, key=natural_key):
            full.setdefault(paths[node][:depth], []).append(node)
        uses: dict[str, int] = {}
        for path in full:
            uses[path[-1]] = uses.get(path[-1], 0) + 1
        switches = {
            (path[-1] if uses[path[-1]] == 1 else "/".join(path)): tuple(nodes)
            for path, nodes in full.items()
        }
        tiers.append(Tier(labels[depth - 1], switches))
    return (kind, tuple(tiers)) if tiers and paths else ("flat", ())


def tree(switches: Mapping[str, tuple[list[str], list[str]]], source: str = "topology") -> Topology:
    """Builds a topology from switches: name -> (child switches, own nodes). Uneven depths are
    levelled: a short branch repeats its top.

    Raises OrchError (65) for an unknown child, a cycle, or a node under two leaves.
    """
    parents: dict[str, str] = {}
    for name, (children, _) in switches.items():
        for child in children:
            if child not in switches:
                raise bad(source, f"switch {name} has an unknown child {child}")
            # Of several parents (fat trees) the first is kept: all reach the same nodes.
            parents.setdefault(child, name)
    height = dict.fromkeys(switches, 0)
    for name, (children, _) in switches.items():
        if not children:
            for length, ancestor in enumerate(_ancestors(name, parents, source), 1):
                height[ancestor] = max(height[ancestor], length)
    leaf_of = _leaves(switches, parents, source)
    depth = max(height.values(), default=-1) + 1
    tiers = []
    for level in range(depth):
        members: dict[str, list[str]] = {}
        for node, leaf in leaf_of.items():
            switch = leaf
            while switch in parents and height[parents[switch]] <= level:
                switch = parents[switch]
            members.setdefault(switch, []).append(node)
        tier_switches = {switch: tuple(nodes) for switch, nodes in members.items()}
        tiers.append(Tier(tier_name(level, depth), tier_switches))
    return Topology("tree", tuple(tiers)) if leaf_of else FLAT


def _leaves(
    switches: Mapping[str, tuple[list[str], list[str]]],
    parents: Mapping[str, str],
    source: str,
) -> dict[str, str]:
    """Maps each node to its leaf switch. Raises OrchError (65) for a cycle or a node under two
    leaves."""
    leaf_of: dict[str, str] = {}
    for name, (children, nodes) in switches.items():
        if children:
            for _ in _ancestors(name, parents, source):
                pass  # a cycle has no leaf to start from
            continue
        for node in nodes:
            if node in leaf_of:
                both = f"{leaf_of[node]} and {name}"
                raise bad(source, f"node {node} is under two leaf switches, {both}")
            leaf_of[node] = name
    return leaf_of


def _ancestors(name: str, parents: Mapping[str, str], source: str) -> Iterator[str]:
    current = name
    path = [name]
    while current in parents:
        current = parents[current]
        if current in path:
            cycle = " -> ".join([*path[path.index(current) :], current][:6])
            raise bad(source, f"switch {current} is its own ancestor ({cycle})")
        if len(path) > MAX_DEPTH:
            raise bad(source, f"switch {name} has more than {MAX_DEPTH} switches above it")
        path.append(current)
        yield current


def tier_name(level: int, depth: int) -> str:
    if level == 0:
        return "leaf"
    if level == 1:
        return "spine"
    return "core" if level == depth - 1 else f"tier{level}"


def bad(source: str, reason: str) -> OrchError:
    return OrchError(f"{source}: {reason}", Exit.CONFIG)
