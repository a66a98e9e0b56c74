"""Slurm's picture of the network, from any of its spellings, as tiers of switches. Pure.

Read: `scontrol show topology` (live), `topology.conf` (tree: SwitchName, block: BlockName, BlockSizes) and
`topology.yaml` (Slurm 25.05 and later). The result is a list of tiers, innermost first, in which every node stands
under exactly one switch of each tier: what a plan's cluster needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .hostlist import expand, natural_key

Kind = Literal["tree", "block", "flat"]


class Tier(Struct, frozen=True):
    name: str
    switches: dict[str, tuple[str, ...]]  # switch (or block) -> names of all nodes below it


class Topology(Struct, frozen=True):
    kind: Kind
    tiers: tuple[Tier, ...]  # innermost first; empty when flat
    block_size: int = 0  # nodes of one base block, as Slurm counts them for --segment; 0 unless kind is block

    def order(self, nodes: Iterable[str]) -> list[str]:
        """Nodes so that those under one switch are neighbours, on every tier; natural order otherwise."""
        paths = [{node: index for index, name in enumerate(tier.switches) for node in tier.switches[name]}
                 for tier in reversed(self.tiers)]  # fmt: skip
        far = len(self.tiers[0].switches) if self.tiers else 0
        return sorted(nodes, key=lambda node: ([path.get(node, far) for path in paths], natural_key(node)))


FLAT = Topology("flat", ())


def parse_topology(text: str) -> Topology:
    """Any of the three spellings. An empty text, or Slurm's "no topology" messages, is flat."""
    if re.search(r"^\s*-?\s*(topology|tree|block|flat)\s*:", text, re.M):
        return parse_yaml(text)
    records = list(_records(text))
    switches = [r for r in records if "SwitchName" in r]
    blocks = [r for r in records if "BlockName" in r]
    if switches and blocks:
        raise _bad("it mixes SwitchName and BlockName lines")
    if switches:
        return _tree({r["SwitchName"]: (_children(r), _nodes(r)) for r in switches})
    if blocks:
        sizes = next((r["BlockSizes"] for r in records if "BlockSizes" in r), "")
        sizes = sizes or ",".join(r["BlockSize"] for r in blocks[:1] if "BlockSize" in r)
        return _blocks({r["BlockName"]: _nodes(r) for r in blocks}, [int(s) for s in re.findall(r"[0-9]+", sizes)])
    if any("RingName" in r for r in records):
        return _blocks({r["RingName"]: _nodes(r) for r in records if "RingName" in r}, [])
    return FLAT


def parse_yaml(text: str, name: str | None = None) -> Topology:
    """`topology.yaml`: the topology called `name`, else the cluster's default, else the first."""
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _bad(f"it is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries) or not entries:
        raise _bad("topology.yaml is a list of topologies")
    named = {str(entry.get("topology", index)): entry for index, entry in enumerate(entries)}
    if name is not None and name not in named:
        raise _bad(f"it has no topology {name!r}, only {', '.join(named)}")
    chosen = named[name] if name else next((e for e in entries if e.get("cluster_default")), entries[0])
    if "tree" in chosen:
        rows = _rows(chosen["tree"], "switches")
        return _tree(
            {str(r["switch"]): (expand(str(r.get("children", ""))), expand(str(r.get("nodes", "")))) for r in rows}
        )
    if "block" in chosen:
        sizes = chosen["block"].get("block_sizes", [])
        rows = _rows(chosen["block"], "blocks")
        return _blocks({str(r["block"]): expand(str(r.get("nodes", ""))) for r in rows}, [int(s) for s in sizes])
    return FLAT


def from_addresses(addresses: Mapping[str, str]) -> Topology:
    """From each node's own SLURM_TOPOLOGY_ADDR (`spine.leaf0.n2`, top first): what tasks know without scontrol.

    A node whose address is its bare name stands alone. Several names at one place (`leafA,leafB`, multi-path trees)
    are one switch of that compound name.
    """
    paths = {node: address.split(".")[:-1] if address != node else [] for node, address in addresses.items()}
    # A node name may hold dots itself: the address ends with it.
    for node, address in addresses.items():
        if address.endswith("." + node):
            paths[node] = address[: -len(node) - 1].split(".")
    depth = max((len(path) for path in paths.values()), default=0)
    tiers = []
    for height in range(depth):  # 0: the leaves
        switches: dict[str, list[str]] = {}
        for node in sorted(paths, key=natural_key):
            path = paths[node]
            kept = path[: max(len(path) - height, 1)] if path else [node]
            switches.setdefault(".".join(kept), []).append(node)
        tiers.append(Tier(_tier_name(height, depth), {k: tuple(v) for k, v in switches.items()}))
    return Topology("tree", tuple(tiers)) if tiers else FLAT


def _tree(switches: Mapping[str, tuple[list[str], list[str]]]) -> Topology:
    """switches: name -> (child switches, own nodes). Uneven depths are levelled: a short branch repeats its top."""
    parents: dict[str, str] = {}
    for name, (children, _) in switches.items():
        for child in children:
            if child not in switches:
                raise _bad(f"switch {name} has an unknown child {child}")
            parents.setdefault(child, name)  # of several parents (fat trees) the first is kept: they reach the same
    height = {name: 0 for name in switches}
    for name in switches:
        length, at = 0, name
        while at in parents:
            at, length = parents[at], length + 1
            height[at] = max(height[at], length)
            if length > len(switches):
                raise _bad(f"switch {name} is its own ancestor")
    leaf_of: dict[str, str] = {}
    for name, (children, nodes) in switches.items():
        if not children:
            for node in nodes:
                if node in leaf_of:
                    raise _bad(f"node {node} is under two leaf switches, {leaf_of[node]} and {name}")
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
        tiers.append(Tier(_tier_name(level, depth), {k: tuple(v) for k, v in members.items()}))
    return Topology("tree", tuple(tiers)) if leaf_of else FLAT


def _blocks(blocks: Mapping[str, list[str]], sizes: list[int]) -> Topology:
    """Base blocks, and one tier for each further size of BlockSizes: that many nodes' worth of consecutive blocks."""
    base = sizes[0] if sizes else max((len(nodes) for nodes in blocks.values()), default=0)
    tiers = [Tier("block", {name: tuple(nodes) for name, nodes in blocks.items()})]
    names = list(blocks)
    for size in sizes[1:]:
        step = size // base
        if step < 2 or step & (step - 1) or size % base:
            raise _bad(f"BlockSizes {sizes}: {size} is not {base} times a power of two")
        groups = [names[i : i + step] for i in range(0, len(names), step)]
        tiers.append(Tier(f"block{size}", {g[0]: tuple(n for name in g for n in blocks[name]) for g in groups}))
    return Topology("block", tuple(tiers), base) if blocks else FLAT


def _tier_name(level: int, depth: int) -> str:
    if level == 0:
        return "leaf"
    return "spine" if level == 1 else ("core" if level == depth - 1 else f"tier{level}")


def _records(text: str) -> Iterable[dict[str, str]]:
    """`Key=value` lines; a value has no blanks. Comments and line continuations as in slurm.conf."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = line.split("#")[0].split()
        found = dict(word.split("=", 1) for word in words if "=" in word)
        # Keys are case-insensitive in topology.conf; the names used here are Slurm's own.
        proper = {
            k.lower(): k
            for k in ("SwitchName", "Switches", "Nodes", "BlockName", "BlockSizes", "BlockSize", "RingName")
        }
        if found:
            yield {proper.get(key.lower(), key): value for key, value in found.items()}


def _children(record: Mapping[str, str]) -> list[str]:
    return expand(record.get("Switches", ""))


def _nodes(record: Mapping[str, str]) -> list[str]:
    return expand(record.get("Nodes", ""))


def _rows(part: Any, key: str) -> list[dict[str, Any]]:
    rows = part.get(key) if isinstance(part, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _bad(f"topology.yaml lacks the list {key!r}")
    return rows


def _bad(why: str) -> OrchError:
    return OrchError(f"Slurm topology: {why}", Exit.CONFIG)
