"""Reads a topology from the text of `ibnetdiscover`. Pure.

The text lists every switch and channel adapter with its links. A switch's height is its distance
to the nearest adapter. Switches of height 0 that serve mostly the same nodes form one leaf group
(on a rail-optimised fabric there is one leaf per rail, so eight switches make one group). Leaf
groups that are connected through switches of height at most 1 form a pod, and so on. So any fat
tree, its missing links included, becomes tiers that nest.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from itertools import combinations

from orchestrator.cluster.hostlist import natural_key
from orchestrator.cluster.model import FLAT, MAX_DEPTH, Machine, Tier, Topology, bad, tier_name

WHERE = "ibnetdiscover"
_HEAD = re.compile(r'(Switch|Ca|Hca|Rt)\s+[0-9]+\s+"([SHR]-[0-9a-f]+)"\s*#\s*"([^"]*)"')
_LINK = re.compile(
    r'\[[0-9]+\](?:\([0-9a-f]+\))?\s+"([SHR]-[0-9a-f]+)"'
    r"\[[0-9]+\](?:\([0-9a-f]+\))?(?:\s*#\s*(.*))?\Z"
)
_SPEED = re.compile(r"\b(1|2|4|8|12)x(SDR|DDR|QDR|FDR10|FDR|EDR|HDR|NDR|XDR)\b")
#: Gb/s of one lane (InfiniBand Architecture Specification; data rate).
_LANE = {
    "SDR": 2,
    "DDR": 4,
    "QDR": 8,
    "FDR10": 10,
    "FDR": 13.64,
    "EDR": 25,
    "HDR": 50,
    "NDR": 100,
    "XDR": 200,
}
_SYSTEM = re.compile(r"sysimgguid=0x([0-9a-f]+)")
#: A driver's name of an adapter, after the host's name: mlx5_0, mthca0, hfi1_0, HCA-1, ibp23s0.
_DEVICE = re.compile(r"(?:mlx|mthca|hfi|qib|ipath|ehca|bnxt|ib|roce|rdma|hca)[\w-]*\d\Z", re.I)
#: Words in the description that an adapter's maker has given it.
_MAKER = re.compile(
    r"^MT\d+|mellanox|technologies|infinihost|connectx|nvidia|qlogic|voltaire", re.I
)
_NO_HOST = re.compile(r"aggregation node|sharp", re.I)  # an adapter inside a switch


def parse_ibnetdiscover(content: str) -> Topology:
    """Returns the tiers of a fabric, with rates and oversubscription if the links report them.
    OrchError (65) names the line.

    A node is the first word of its adapters' descriptions (`node7 mlx5_0`). Each system whose
    adapters name no host, or the same host as those of other systems, counts as a node that is
    called by the system's GUID.
    """
    system = ""
    systems = {}  # adapter -> GUID of its system
    label: dict[str, str] = {}  # switch or adapter -> description
    links: dict[str, list[tuple[str, float]]] = {}
    device = ""
    for number, line in enumerate(content.splitlines(), 1):
        if match := _HEAD.match(line):
            device = match[2]
            if device in links:
                raise bad(WHERE, f"line {number}: duplicate device {device}")
            label[device] = match[3]
            links[device] = []
            systems[device] = system.zfill(16) if system.strip("0") else device[2:]
        elif match := _SYSTEM.match(line):
            system = match[1]
        elif line.startswith("["):
            match = _LINK.match(line.rstrip())
            if not match or not device:
                raise bad(
                    WHERE,
                    f"line {number}: {line[:60]!r} is not a link"
                    + ("" if device else " of a switch or adapter"),
                )
            speed = _SPEED.search(match[2] or "")
            bandwidth = int(speed[1]) * _LANE[speed[2]] if speed else 0.0
            links[device].append((match[1], bandwidth))
        elif not line.strip():
            device = system = ""
    for name, ends in links.items():
        for peer, _ in ends:
            if peer not in links:
                raise bad(WHERE, f"{name} has a link to {peer}, which is not in the text")
    adapters = {
        name: content
        for name, content in label.items()
        if name[0] == "H" and not _NO_HOST.search(content)
    }
    return _topology(label, links, _hosts(adapters, systems))


def _hosts(adapters: dict[str, str], systems: dict[str, str]) -> dict[str, str]:
    """Maps each adapter to its node. Raises OrchError (65) if several hosts have one name and
    several adapters each."""
    named: dict[str, list[str]] = {}
    for name, description in adapters.items():
        is_unnamed = _MAKER.search(description) and not _device(description)
        named.setdefault("" if is_unnamed else _first_word(description), []).append(name)
    result = {}
    for host, group in named.items():
        systems_by_device: dict[str, set[str]] = {}
        for name in group:
            systems_by_device.setdefault(_device(adapters[name]), set()).add(systems[name])
        all_systems = set().union(*systems_by_device.values())
        apart = (
            all(len(systems_of_one) == 1 for systems_of_one in systems_by_device.values())
            and "" not in systems_by_device
        )
        if host and (len(all_systems) == 1 or apart):
            result.update(dict.fromkeys(group, host))
        elif host and "" not in systems_by_device and len(systems_by_device) > 1:
            device, systems_of_one = max(systems_by_device.items(), key=lambda item: len(item[1]))
            raise bad(
                WHERE,
                f"{len(systems_of_one)} adapters are described as '{host} {device}', and their"
                " hosts have further adapters: it is unknown which belong together; set the hosts'"
                " node descriptions (rdma-ndd does)",
            )
        else:
            result.update({name: systems[name] for name in group})
    return result


def _device(description: str) -> str:
    """Returns the adapter's word of `node7 mlx5_0`; "" if there is none."""
    tokens = description.replace("'", " ").split()
    return tokens[1] if len(tokens) > 1 and _DEVICE.match(tokens[1]) else ""


def _topology(
    label: dict[str, str],
    links: dict[str, list[tuple[str, float]]],
    hosts: dict[str, str],
) -> Topology:
    """Returns the tiers of the switches between `hosts`, which maps adapters to their nodes."""
    height = _heights(links, hosts)
    if not height:
        return FLAT
    adapters = Counter(
        host for name, host in hosts.items() if any(end in height for end, _ in links[name])
    )
    tiers = _tiers(label, links, hosts, height, adapters)
    machines = {host: Machine(nics=count) for host, count in adapters.items()}
    return Topology("tree", tiers, machines=machines)


def _tiers(
    label: dict[str, str],
    links: dict[str, list[tuple[str, float]]],
    hosts: dict[str, str],
    height: dict[str, int],
    adapters: Counter[str],
) -> tuple[Tier, ...]:
    """Returns the tiers of a fabric, innermost first, up to the one whose block has all nodes.

    `height` is the result of `_heights`, and `adapters` the number of each node's adapters. Raises
    OrchError (65) if the fabric is too high.
    """
    top = max(height.values())
    if top > MAX_DEPTH:
        raise bad(WHERE, f"a chain of {top} switches is not a fabric")
    leaves = [switch for switch, hops in height.items() if hops == 0]
    parent: dict[str, str] = {}
    _join_leaves(parent, links, leaves, hosts)
    groups = _groups(parent, adapters)
    levels = [(_named(groups, parent, label, leaves), *_figures(links, height, hosts, 0))]
    depth = top + 1
    for level in range(depth):
        _join_switches(parent, links, height, level)
        groups_before = len(groups)
        groups = _groups(parent, adapters)
        if level > 0:
            of_level = [switch for switch, hops in height.items() if hops == level]
            switches = _named(groups, parent, label, of_level)
            levels.append((switches, *_figures(links, height, hosts, level)))
        elif len(groups) < groups_before:  # leaves with cables between them
            depth += 1
            levels.append((_named(groups, parent, label, leaves), 0.0, 0.0))
        if len(groups) == 1:
            break
    return tuple(Tier(tier_name(level, depth), *figures) for level, figures in enumerate(levels))


def _join_switches(
    parent: dict[str, str],
    links: dict[str, list[tuple[str, float]]],
    height: dict[str, int],
    level: int,
) -> None:
    """Joins the switches up to this height that have a link to each other."""
    for name in [switch for switch, hops in height.items() if hops <= level]:
        for peer, _ in links[name]:
            if height.get(peer, level + 1) <= level:
                _join(parent, name, peer)


def _join_leaves(
    parent: dict[str, str],
    links: dict[str, list[tuple[str, float]]],
    leaves: list[str],
    hosts: dict[str, str],
) -> None:
    """Joins leaves into groups if they share more than half of the nodes of the one that has
    fewer, and puts each node into the group that most of its links go to. A node with links to
    two groups does not join them."""
    ends: dict[str, Counter[str]] = {}  # node -> leaf -> links
    for name, host in hosts.items():
        ends.setdefault(host, Counter()).update(end for end, _ in links[name] if end[0] == "S")
    served = Counter(leaf for counts in ends.values() for leaf in counts)
    shared = Counter(pair for counts in ends.values() for pair in combinations(sorted(counts), 2))
    for leaf in leaves:
        _root(parent, leaf)
    for (leaf_a, leaf_b), count in shared.items():
        if 2 * count > min(served[leaf_a], served[leaf_b]):
            _join(parent, leaf_a, leaf_b)
    for host, counts in ends.items():
        groups: Counter[str] = Counter()
        for leaf, count in counts.items():
            groups[_root(parent, leaf)] += count
        if groups:
            _join(parent, host, groups.most_common(1)[0][0])


def _groups(parent: dict[str, str], nodes: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for node in sorted(nodes, key=natural_key):
        groups.setdefault(_root(parent, node), []).append(node)
    return groups


def _first_word(description: str) -> str:
    return next(iter(description.replace("'", " ").split()), "")


def _heights(links: dict[str, list[tuple[str, float]]], hosts: dict[str, str]) -> dict[str, int]:
    """Maps each switch to its hops to the nearest adapter of a node; switches that reach none
    are left out."""
    height: dict[str, int] = {}
    queue: deque[str] = deque()
    for name in hosts:
        for peer, _ in links[name]:
            if peer[0] == "S" and peer not in height:
                height[peer] = 0
                queue.append(peer)
    while queue:
        name = queue.popleft()
        for peer, _ in links[name]:
            if peer[0] == "S" and peer not in height:
                height[peer] = height[name] + 1
                queue.append(peer)
    return height


def _root(parent: dict[str, str], name: str) -> str:
    while parent.setdefault(name, name) != name:
        parent[name] = parent[parent[name]]
        name = parent[name]
    return name


def _join(parent: dict[str, str], a: str, b: str) -> None:
    parent[_root(parent, a)] = _root(parent, b)


def _named(
    groups: dict[str, list[str]],
    parent: dict[str, str],
    label: dict[str, str],
    switches: Iterable[str],
) -> dict[str, tuple[str, ...]]:
    """Names each group after the first of its switches on this level: by the first word of its
    description if that is unique."""
    first: dict[str, str] = {}
    for switch in switches:
        root = _root(parent, switch)
        first[root] = min(
            first.get(root, switch),
            switch,
            key=lambda s: (natural_key(label[s]), s),
        )
    # a managed switch describes itself as "MF0;leaf-01:MQM9700/U1"
    short = {
        root: _first_word(label[switch].split(";")[-1].split(":")[0]) or switch
        for root, switch in first.items()
    }
    count = Counter(short.values())
    result = {}
    for root, nodes in groups.items():
        name = short.get(root, nodes[0])
        if count[name] != 1:
            name = first.get(root, nodes[0])
        result[name] = tuple(nodes)
    return result


def _figures(
    links: dict[str, list[tuple[str, float]]],
    height: dict[str, int],
    hosts: dict[str, str],
    level: int,
) -> tuple[float, float]:
    """Returns the Gb/s of the slowest link below this level's switches, and the bandwidth below
    / bandwidth upwards over the level."""
    down = 0.0
    up = 0.0
    slowest = 0.0
    for switch, switch_height in height.items():
        if switch_height != level:
            continue
        for peer, rate in links[switch]:
            if peer in hosts or height.get(peer, level) < level:
                down += rate
                slowest = min(slowest or rate, rate) if rate else slowest
            elif height.get(peer, level) > level:
                up += rate
    return slowest, round(down / up, 3) if up else 0.0
