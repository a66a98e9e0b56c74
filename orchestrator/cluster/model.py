"""One model of a network: machines, NVLink domains and tiers of switches, all by name. Pure.

Every importer ends here and everything else starts here, so a rack is the same thing whether Slurm,
Kubernetes or the subnet manager described it. Membership may be ragged; machines may differ and may
be out of service.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .hostlist import natural_key

Kind = Literal["tree", "block", "flat"]
SHARED = "shared GPUs"
MIG = "MIG slices"  # reasons: what a node advertises are not whole GPUs
BLOCK = (  # the innermost tier of a block topology; the further ones have their size behind it
    "block"
)
MAX_DEPTH = 64  # switches above one another; no network is that deep


ONLY_SLICES = "without a whole GPU, slices only"  # a machine's reason
NO_GPUS = "without GPUs"  # a machine's reason
#: Reasons why a machine has no whole GPUs for a job -> as it is said of a node.
GPU_REASONS = {
    SHARED: f"with {SHARED}",
    MIG: f"with {MIG}",
    ONLY_SLICES: ONLY_SLICES,
    NO_GPUS: NO_GPUS,
}


class GpuCount(Struct, frozen=True):
    """So many GPUs of one model ("": its name is unknown)."""

    gpus: int
    gpu: str


class Machine(Struct, frozen=True, kw_only=True):
    """What is known of one node; 0 and "" are unknown."""

    gpus: int = 0
    gpu: str = ""
    other_gpus: tuple[GpuCount, ...] = ()  # of further models, which are not counted in `gpus`
    nics: int = 0
    free: bool = True  # may take a job
    reason: str = ""  # why not


class Tier(Struct, frozen=True):
    name: str
    switches: dict[str, tuple[str, ...]]  # switch (or block) -> names of all nodes below it
    gbit_per_s: float = 0.0  # of one port; 0 = unknown
    oversubscription: float = 0.0  # bandwidth below / bandwidth upwards; 0 = unknown


class Topology(Struct, frozen=True):
    kind: Kind
    tiers: tuple[Tier, ...]  # innermost first; empty when flat
    block_size: int = (
        0  # nodes of one base block, as Slurm counts them for --segment; 0 unless kind is block
    )
    name: str = ""
    domains: dict[
        str, tuple[str, ...]
    ] = {}  # NVLink domains of several nodes; a node in none is its own
    machines: dict[str, Machine] = {}

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Slurm's BlockSizes: of a base block, then of a block of each further tier. () where they
        are unknown."""
        sizes = [tier.name.removeprefix(BLOCK) for tier in self.tiers[1:]]
        if (
            self.kind != "block"
            or not self.block_size
            or not all(size.isdecimal() for size in sizes)
        ):
            return ()
        return (self.block_size, *map(int, sizes))

    def order(self, nodes: Iterable[str]) -> list[str]:
        """Nodes so that those under one switch are neighbours, on every tier; natural order
        otherwise."""
        groups = [tier.switches for tier in reversed(self.tiers)] + (
            [self.domains] if self.domains else []
        )
        paths = [
            {node: index for index, name in enumerate(group) for node in group[name]}
            for group in groups
        ]
        far = max((len(group) for group in groups), default=0)
        return sorted(
            nodes, key=lambda node: ([path.get(node, far) for path in paths], natural_key(node))
        )

    @property
    def nodes(self) -> list[str]:
        """Every node that anything names, in topology order."""
        named: dict[str, None] = dict.fromkeys(self.machines)
        for group in ([tier.switches for tier in self.tiers[:1]] or []) + [self.domains]:
            for members in group.values():
                named.update(dict.fromkeys(members))
        return self.order(named)

    @property
    def free(self) -> list[str]:
        """Nodes that may take a job: all that nobody took out of service."""
        return [
            node for node in self.nodes if node not in self.machines or self.machines[node].free
        ]


FLAT = Topology("flat", ())


def check(topology: Topology, source: str) -> Topology:
    """The topology, if every node stands under at most one switch of a tier and tiers nest. Raises
    OrchError (65)."""
    below: tuple[str, Mapping[str, tuple[str, ...]]] | None = (
        ("domain", topology.domains) if topology.domains else None
    )
    for tier in topology.tiers:
        owner: dict[str, str] = {}
        for switch, nodes in tier.switches.items():
            for node in nodes:
                if node in owner:
                    raise bad(
                        source,
                        f"node {node} is under two {tier.name} switches, {owner[node]} and"
                        f" {switch}",
                    )
                owner[node] = switch
        lower, groups = below or ("", {})
        for name, nodes in groups.items():
            above = {owner.get(node) for node in nodes}
            if len(above) > 1:
                example = ", ".join(sorted(str(switch) for switch in above)[:2])
                raise bad(
                    source, f"{lower} {name} is split over several {tier.name} switches ({example})"
                )
        below = tier.name, tier.switches
    return topology


def from_paths(
    paths: Mapping[str, tuple[str, ...]], names: Iterable[str], kind: Kind = "tree"
) -> tuple[Kind, tuple[Tier, ...]]:
    """(kind, tiers) from each node's switches, coarse to fine, all of one length. `names`: of the
    tiers, coarse first.

    A switch is called by its own name; where that name stands under two parents, by its whole path.
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
            (p[-1] if uses[p[-1]] == 1 else "/".join(p)): tuple(nodes) for p, nodes in full.items()
        }
        tiers.append(Tier(labels[depth - 1], switches))
    return (kind, tuple(tiers)) if tiers and paths else ("flat", ())


def tree(switches: Mapping[str, tuple[list[str], list[str]]], source: str = "topology") -> Topology:
    """switches: name -> (child switches, own nodes). Uneven depths are levelled: a short branch
    repeats its top.

    Raises OrchError (65) that names an unknown child, a circle, or a node under two leaves.
    """
    parents: dict[str, str] = {}
    for name, (children, _) in switches.items():
        for child in children:
            if child not in switches:
                raise bad(source, f"switch {name} has an unknown child {child}")
            parents.setdefault(
                child, name
            )  # of several parents (fat trees) the first is kept: they reach the same
    height = dict.fromkeys(switches, 0)
    for name, (children, _) in switches.items():
        if not children:
            for length, at in enumerate(_ancestors(name, parents, source), 1):
                height[at] = max(height[at], length)
    leaf_of: dict[str, str] = {}
    for name, (children, nodes) in switches.items():
        if children:
            for _ in _ancestors(name, parents, source):
                pass  # a circle has no leaf to start from
            continue
        for node in nodes:
            if node in leaf_of:
                raise bad(
                    source, f"node {node} is under two leaf switches, {leaf_of[node]} and {name}"
                )
            leaf_of[node] = name
    depth = max(height.values(), default=-1) + 1
    tiers = []
    for level in range(depth):
        members: dict[str, list[str]] = {}
        for node, leaf in leaf_of.items():
            at = leaf
            while at in parents and height[parents[at]] <= level:
                at = parents[at]
            members.setdefault(at, []).append(node)
        tiers.append(Tier(tier_name(level, depth), {k: tuple(v) for k, v in members.items()}))
    return Topology("tree", tuple(tiers)) if leaf_of else FLAT


def _ancestors(name: str, parents: Mapping[str, str], source: str) -> Iterator[str]:
    current = name
    path = [name]
    while current in parents:
        current = parents[current]
        if current in path:
            raise bad(
                source,
                f"switch {current} is its own ancestor"
                f" ({' -> '.join([*path[path.index(current) :], current][:6])})",
            )
        if len(path) > MAX_DEPTH:
            raise bad(source, f"switch {name} has more than {MAX_DEPTH} switches above it")
        path.append(current)
        yield current


def tier_name(level: int, depth: int) -> str:
    if level == 0:
        return "leaf"
    return "spine" if level == 1 else ("core" if level == depth - 1 else f"tier{level}")


def bad(source: str, reason: str) -> OrchError:
    return OrchError(f"{source}: {reason}", Exit.CONFIG)
