"""What changed between two topologies of the same cluster, in words. Pure."""

from __future__ import annotations

from collections import Counter

from .hostlist import compress
from .model import GpuCount, Topology


def diff(old: Topology, new: Topology) -> list[str]:
    """One line a change: nodes come and gone, moved under another switch, out of service or back,
    other hardware.

    Switches are compared by their members, so a renamed switch is no change.
    """
    before = old.nodes
    after = new.nodes
    lines = _list("nodes gone", set(before) - set(after)) + _list(
        "nodes new", set(after) - set(before)
    )
    both = set(before) & set(after)
    if len(old.tiers) != len(new.tiers):
        lines.append(f"tiers: {len(old.tiers)} before, {len(new.tiers)} now")
    if old.block_sizes != new.block_sizes:
        lines.append(f"block sizes: {_sizes(old)} before, {_sizes(new)} now")
    for a, b in zip(old.tiers, new.tiers, strict=False):
        lines += _moved(a.switches, b.switches, both, a.name)
        for what, x, y in (
            ("Gb/s", a.gbit_per_s, b.gbit_per_s),
            ("oversubscription", a.oversubscription, b.oversubscription),
        ):
            if x != y:
                lines.append(f"{a.name}: {what} {x:g} before, {y:g} now")
    lines += _moved(old.domains, new.domains, both, "domain")
    known = [node for node in both if node in old.machines and node in new.machines]
    groups: dict[str, list[str]] = {}
    for node in known:
        was = old.machines[node]
        now = new.machines[node]
        if was.free != now.free:
            groups.setdefault(
                f"out of service ({now.reason})" if was.free else "back in service", []
            ).append(node)
        for key in ("gpus", "gpu", "other_gpus", "nics"):
            before = getattr(was, key)
            after = getattr(now, key)
            if before != after:
                groups.setdefault(
                    f"{key}: {_shown(before)} before, {_shown(after)} now", []
                ).append(node)
    return lines + [f"{what}: {compress(nodes)}" for what, nodes in sorted(groups.items())]


def _shown(value: int | str | tuple[GpuCount, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{one.gpus} {one.gpu}" for one in value) or "none"
    return str(value)


def _sizes(topology: Topology) -> str:
    return ",".join(map(str, topology.block_sizes)) or "none"


def _list(what: str, nodes: set[str]) -> list[str]:
    return [f"{what}: {compress(nodes)}"] if nodes else []


def _moved(
    a: dict[str, tuple[str, ...]], b: dict[str, tuple[str, ...]], both: set[str], tier: str
) -> list[str]:
    """Nodes that left their companions: each new switch continues the old one with which it shares
    most nodes."""
    old = {node: name for name, nodes in a.items() for node in nodes if node in both}
    new = {node: name for name, nodes in b.items() for node in nodes if node in both}
    shared = Counter((old[node], new[node]) for node in both if node in old and node in new)
    heir: dict[str, str] = {}
    taken: set[str] = set()
    for (x, y), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
        if x not in heir and y not in taken:
            heir[x] = y
            taken.add(y)
    groups: dict[str, list[str]] = {}
    for node in both:
        left = old.get(node)
        joined = new.get(node)
        if (left is None) != (joined is None) or (left is not None and heir.get(left) != joined):
            groups.setdefault(
                f"{tier}: moved from {left or 'nowhere'} to {joined or 'nowhere'}", []
            ).append(node)
    return [f"{what}: {compress(nodes)}" for what, nodes in sorted(groups.items())]
