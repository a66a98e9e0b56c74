"""`ibnetdiscover` text -> topology. Pure.

The text lists every switch and channel adapter with its links. A tier is what hangs together without going higher: two
nodes share a leaf group when their adapters meet on switches of height 0 (on a rail-optimised fabric that is one leaf a
rail, so eight switches make one group), a pod when they meet through switches of height at most 1, and so on. Height is
the distance to the nearest adapter. So any fat tree, its missing links included, becomes tiers that nest.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

from orchestrator.cluster.hostlist import natural_key
from orchestrator.cluster.model import FLAT, MAX_DEPTH, Machine, Tier, Topology, bad, tier_name

WHERE = "ibnetdiscover"
_HEAD = re.compile(r'(Switch|Ca|Hca|Rt)\s+[0-9]+\s+"([SHR]-[0-9a-f]+)"\s*#\s*"([^"]*)"')
_LINK = re.compile(r'\[[0-9]+\](?:\([0-9a-f]+\))?\s+"([SHR]-[0-9a-f]+)"\[[0-9]+\](?:\([0-9a-f]+\))?(?:\s*#\s*(.*))?\Z')
_SPEED = re.compile(r"\b(1|2|4|8|12)x(SDR|DDR|QDR|FDR10|FDR|EDR|HDR|NDR|XDR)\b")
#: Gb/s of one lane (InfiniBand Architecture Specification; data rate).
_LANE = {"SDR": 2, "DDR": 4, "QDR": 8, "FDR10": 10, "FDR": 13.64, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
_NO_HOST = re.compile(r"aggregation node|sharp", re.I)  # an adapter inside a switch


def parse_ibnetdiscover(text: str) -> Topology:
    """The tiers of a fabric, with rates and oversubscription where the links tell. OrchError (65) names the line.

    A node is the first word of its adapters' descriptions (`node7 mlx5_0`).
    """
    label: dict[str, str] = {}  # switch or adapter -> description
    links: dict[str, list[tuple[str, float]]] = {}
    at = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _HEAD.match(line):
            at = found[2]
            if at in links:
                raise bad(WHERE, f"line {number}: {at} stands there twice")
            label[at], links[at] = found[3], []
        elif line.startswith("["):
            found = _LINK.match(line.rstrip())
            if not found or not at:
                raise bad(
                    WHERE, f"line {number}: {line[:60]!r} is not a link" + ("" if at else " of a switch or adapter")
                )
            speed = _SPEED.search(found[2] or "")
            links[at].append((found[1], int(speed[1]) * _LANE[speed[2]] if speed else 0.0))
        elif not line.strip():
            at = ""
    for name, ends in links.items():
        for other, _ in ends:
            if other not in links:
                raise bad(WHERE, f"{name} has a link to {other}, which is not in the text")
    return _tiers(label, links)


def _tiers(label: dict[str, str], links: dict[str, list[tuple[str, float]]]) -> Topology:
    hosts = {name: _host(text) for name, text in label.items() if name[0] == "H" and not _NO_HOST.search(text)}
    height = _heights(links, hosts)
    if not height:
        return FLAT
    top = max(height.values())
    if top > MAX_DEPTH:
        raise bad(WHERE, f"a chain of {top} switches is no fabric")
    adapters = Counter(host for name, host in hosts.items() if any(end in height for end, _ in links[name]))
    parent: dict[str, str] = {}
    tiers: list[Tier] = []
    for level in range(top + 1):
        for name in [*hosts, *(s for s, h in height.items() if h <= level)]:
            me = hosts.get(name, name)
            for other, _ in links[name]:
                if other in hosts or height.get(other, level + 1) <= level:
                    _join(parent, me, hosts.get(other, other))
        groups: dict[str, list[str]] = {}
        for host in sorted(adapters, key=natural_key):
            groups.setdefault(_root(parent, host), []).append(host)
        switches = _named(groups, parent, label, (s for s, h in height.items() if h == level))
        rate, over = _figures(links, height, hosts, level)
        tiers.append(Tier(tier_name(level, top + 1), switches, rate, over))
        if len(groups) == 1:
            break
    machines = {host: Machine(nics=count) for host, count in adapters.items()}
    return Topology("tree", tuple(tiers), machines=machines)


def _host(description: str) -> str:
    words = description.replace("'", " ").split()
    return words[0] if words else "unnamed"


def _heights(links: dict[str, list[tuple[str, float]]], hosts: dict[str, str]) -> dict[str, int]:
    """Switch -> hops to the nearest adapter of a node; switches that reach none are left out."""
    height: dict[str, int] = {}
    queue: deque[str] = deque()
    for name in hosts:
        for other, _ in links[name]:
            if other[0] == "S" and other not in height:
                height[other] = 0
                queue.append(other)
    while queue:
        name = queue.popleft()
        for other, _ in links[name]:
            if other[0] == "S" and other not in height:
                height[other] = height[name] + 1
                queue.append(other)
    return height


def _root(parent: dict[str, str], name: str) -> str:
    while parent.setdefault(name, name) != name:
        parent[name] = parent[parent[name]]
        name = parent[name]
    return name


def _join(parent: dict[str, str], a: str, b: str) -> None:
    parent[_root(parent, a)] = _root(parent, b)


def _named(
    groups: dict[str, list[str]], parent: dict[str, str], label: dict[str, str], switches: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Each group by the first of its switches on this level: its description's first word where that is unique."""
    first: dict[str, str] = {}
    for switch in switches:
        root = _root(parent, switch)
        first[root] = min(first.get(root, switch), switch, key=lambda s: (natural_key(label[s]), s))
    # a managed switch describes itself as "MF0;leaf-01:MQM9700/U1"
    short = {root: _host(label[switch].split(";")[-1].split(":")[0]) for root, switch in first.items()}
    count = Counter(short.values())
    result = {}
    for root, nodes in groups.items():
        name = short.get(root, nodes[0])
        result[name if count[name] == 1 else first.get(root, nodes[0])] = tuple(nodes)
    return result


def _figures(
    links: dict[str, list[tuple[str, float]]], height: dict[str, int], hosts: dict[str, str], level: int
) -> tuple[float, float]:
    """(Gb/s of the slowest link below this level's switches, bandwidth below / bandwidth upwards over the level)."""
    down, up, slowest = 0.0, 0.0, 0.0
    for switch, its in height.items():
        if its != level:
            continue
        for other, rate in links[switch]:
            if other in hosts or height.get(other, level) < level:
                down += rate
                slowest = min(slowest or rate, rate) if rate else slowest
            elif height.get(other, level) > level:
                up += rate
    return slowest, round(down / up, 3) if up else 0.0
