"""Slurm's network topology, from any of its file formats. Pure.

Read: `scontrol show topology` (live), `topology.conf` (tree: SwitchName, block: BlockName,
BlockSizes, ring: RingName) and `topology.yaml` (Slurm 25.05 and later).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.cluster.hostlist import MAX_NAMES, expand, natural_key
from orchestrator.cluster.model import BLOCK, FLAT, Tier, Topology, bad, tier_name, tree
from orchestrator.config import bounded_yaml
from orchestrator.errors import OrchError

WHERE = "Slurm topology"
_NamedRecords = dict[str, tuple[int, dict[str, str]]]  # name -> its line and `Key=value` pairs
_SWITCH = "SwitchName"
_BLOCK = "BlockName"
_RING = "RingName"
#: Keys are case-insensitive in topology.conf; the names used here are Slurm's own.
_KEYS = {
    key.lower(): key
    for key in (_SWITCH, "Switches", "Nodes", _BLOCK, "BlockSizes", "BlockSize", _RING)
}


def parse_topology(content: str, name: str | None = None) -> Topology:
    """Parses any of the three spellings. An empty text, or Slurm's "no topology" messages, is flat.

    Raises OrchError (65) with one line that names the line of the text.
    """
    if re.search(r"^\s*-?\s*(topology|tree|block|flat)\s*:", content, re.M):
        return parse_yaml(content, name)
    records: dict[str, _NamedRecords] = {
        _SWITCH: {},
        _BLOCK: {},
        _RING: {},
    }
    sizes = ""
    for line, record in _records(content):
        sizes = sizes or record.get("BlockSizes", "") or record.get("BlockSize", "")
        for kind, named in records.items():
            if kind in record:
                if record[kind] in named:
                    first = named[record[kind]][0]
                    raise _bad(f"line {line}: {kind}={record[kind]} is already on line {first}")
                named[record[kind]] = line, record
    used = [kind for kind, named in records.items() if named]
    if len(used) > 1:
        line = max(next(iter(records[kind].values()))[0] for kind in used)
        raise _bad(f"line {line}: it mixes {used[0]} and {used[1]} lines")
    if not used:
        return FLAT
    members = _expanded(records[used[0]])
    if used[0] == _SWITCH:
        return tree(members, WHERE)
    blocks = {key: nodes for key, (_, nodes) in members.items()}
    block_sizes = re.findall(r"[0-9]{1,9}", sizes) if used[0] == _BLOCK else []
    return _blocks(blocks, [int(size) for size in block_sizes])


def _expanded(records: _NamedRecords) -> dict[str, tuple[list[str], list[str]]]:
    """Returns the child switches and the nodes of each record."""
    members = {}
    names = 0
    for key, (line, record) in records.items():
        try:
            members[key] = expand(record.get("Switches", "")), expand(record.get("Nodes", ""))
        except OrchError as error:
            raise _bad(f"line {line}: {error.message}") from None
        names += len(members[key][1])
        if names > 16 * MAX_NAMES:  # scontrol repeats nodes on every level
            raise _bad(f"line {line}: more than {16 * MAX_NAMES} nodes")
    return members


def parse_yaml(content: str, name: str | None = None) -> Topology:
    """Parses `topology.yaml`: the topology called `name`, else the cluster's default, else the
    first."""
    import yaml

    try:
        entries = bounded_yaml.load(content, bounded_yaml.MOST_VALUES)
    except OrchError as error:
        raise _bad(f"topology.yaml: {error.message}") from None
    except yaml.YAMLError as error:
        raise _bad(f"it is not YAML: {str(error).splitlines()[0]}") from None
    if (
        not isinstance(entries, list)
        or not all(isinstance(e, dict) for e in entries)
        or not entries
    ):
        raise _bad("topology.yaml is a list of topologies")
    named = {str(entry.get("topology", index)): entry for index, entry in enumerate(entries)}
    if name is not None and name not in named:
        raise _bad(f"it has no topology {name!r}, only {', '.join(named)}")
    if name:
        chosen = named[name]
    else:
        defaults = (entry for entry in entries if entry.get("cluster_default"))
        chosen = next(defaults, entries[0])
    if "tree" in chosen:
        rows = _rows(chosen["tree"], "switches", "switch")
        return tree(
            {name: (_hosts(row, "children"), _hosts(row, "nodes")) for name, row in rows.items()},
            WHERE,
        )
    if "block" in chosen:
        rows = _rows(chosen["block"], "blocks", "block")
        sizes = chosen["block"].get("block_sizes", [])
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise _bad("topology.yaml: block_sizes is a list of numbers")
        return _blocks(
            {name: _hosts(row, "nodes") for name, row in rows.items()},
            sizes,
        )
    return FLAT


def from_addresses(addresses: Mapping[str, str]) -> Topology:
    """Builds a topology from each node's own SLURM_TOPOLOGY_ADDR (`spine.leaf0.n2`, top first),
    which tasks know without scontrol.

    A node whose address is its bare name is a group of its own. Several names at one place
    (`leafA,leafB`, multi-path trees) are one switch of that compound name.
    """
    paths = {
        node: address.split(".")[:-1] if address != node else []
        for node, address in addresses.items()
    }
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
            switch_path = path[: max(len(path) - height, 1)] if path else [node]
            switches.setdefault(".".join(switch_path), []).append(node)
        tiers.append(
            Tier(
                tier_name(height, depth),
                {k: tuple(v) for k, v in switches.items()},
            )
        )
    return Topology("tree", tuple(tiers)) if tiers else FLAT


def _blocks(blocks: Mapping[str, list[str]], sizes: list[int]) -> Topology:
    """Returns base blocks, and one tier for each further size of BlockSizes: that many nodes of
    consecutive blocks."""
    owner: dict[str, str] = {}
    for name, nodes in blocks.items():
        for node in nodes:
            if node in owner:
                raise _bad(f"node {node} is in two blocks, {owner[node]} and {name}")
            owner[node] = name
    base = sizes[0] if sizes else min((len(nodes) for nodes in blocks.values()), default=0)
    tiers = [Tier(BLOCK, {name: tuple(nodes) for name, nodes in blocks.items()})]
    names = list(blocks)
    if sizes and not base:
        raise _bad(f"BlockSizes {sizes}: a block of no nodes")
    for size in sizes[1:]:
        step = size // base
        if step < 2 or step & (step - 1) or size % base:
            raise _bad(f"BlockSizes {sizes}: {size} is not {base} times a power of two")
        groups = [names[i : i + step] for i in range(0, len(names), step)]
        tiers.append(
            Tier(
                f"{BLOCK}{size}",
                {g[0]: tuple(n for name in g for n in blocks[name]) for g in groups},
            )
        )
    return Topology("block", tuple(tiers), base) if blocks else FLAT


def _records(content: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line, `Key=value` pairs) of each line; a value has no blanks. Comments and
    continuations are those of slurm.conf."""
    lines = iter(enumerate(content.splitlines(), 1))
    for number, line in lines:
        while line.endswith("\\"):
            line = line[:-1] + " " + next(lines, (0, ""))[1]
        pairs = (pair.partition("=") for pair in line.split("#", 1)[0].split())
        record = {_KEYS.get(key.lower(), key): value for key, equals, value in pairs if equals}
        if record:
            yield number, record


def _rows(section: Any, key: str, label: str) -> dict[str, dict[str, Any]]:
    rows = section.get(key) if isinstance(section, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _bad(f"topology.yaml lacks the list {key!r}")
    rows_by_name: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        name = row.get(label)
        if not isinstance(name, str):
            raise _bad(f"topology.yaml: {key}[{index}] lacks {label!r}")
        if name in rows_by_name:
            raise _bad(f"topology.yaml: {key}[{index}]: duplicate name {name}")
        rows_by_name[name] = row
    return rows_by_name


def _hosts(row: Mapping[str, Any], key: str) -> list[str]:
    hosts = row.get(key) or ""
    if not isinstance(hosts, str):
        raise _bad(f"topology.yaml: {key!r} is a host list, not {type(hosts).__name__}")
    return expand(hosts)


def _bad(reason: str) -> OrchError:
    return bad(WHERE, reason)
