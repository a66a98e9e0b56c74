"""Describes what changed between two topologies of the same cluster. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .hostlist import compress
from .model import GpuCount, Machine, Tier, Topology


def diff(old: Topology, new: Topology) -> list[str]:
    """Returns one line per change: nodes that were added or removed, that moved to another switch,
    went out of service or came back, or have other hardware.

    Switches are compared by their members, so a renamed switch is not a change.
    """
    old_nodes = old.nodes
    new_nodes = new.nodes
    lines = _list("nodes gone", set(old_nodes) - set(new_nodes))
    lines += _list("nodes new", set(new_nodes) - set(old_nodes))
    both = set(old_nodes) & set(new_nodes)
    if len(old.tiers) != len(new.tiers):
        lines.append(f"tiers: {len(old.tiers)} before, {len(new.tiers)} now")
    if old.block_sizes != new.block_sizes:
        lines.append(f"block sizes: {_sizes(old)} before, {_sizes(new)} now")
    for old_tier, new_tier in zip(old.tiers, new.tiers, strict=False):
        lines += _moved(old_tier.switches, new_tier.switches, both, old_tier.name)
        lines += _changed_rates(old_tier, new_tier)
    lines += _moved(old.domains, new.domains, both, "domain")
    return lines + _machine_changes(old, new, both)


def _changed_rates(old: Tier, new: Tier) -> Iterator[str]:
    figures = {
        "Gb/s": (old.gbit_per_s, new.gbit_per_s),
        "oversubscription": (old.oversubscription, new.oversubscription),
    }
    for label, (before, after) in figures.items():
        if before != after:
            yield f"{old.name}: {label} {before:g} before, {after:g} now"


def _machine_changes(old: Topology, new: Topology, nodes: set[str]) -> list[str]:
    """Returns one line per change of hardware or service, with the nodes that it concerns."""
    groups: dict[str, list[str]] = {}
    for node in nodes & set(old.machines) & set(new.machines):
        for change in _changes_of_machine(old.machines[node], new.machines[node]):
            groups.setdefault(change, []).append(node)
    return [f"{change}: {compress(nodes)}" for change, nodes in sorted(groups.items())]


def _changes_of_machine(old: Machine, new: Machine) -> Iterator[str]:
    if old.free and not new.free:
        yield f"out of service ({new.reason})"
    if new.free and not old.free:
        yield "back in service"
    for key in ("gpus", "gpu", "other_gpus", "nics"):
        before = getattr(old, key)
        after = getattr(new, key)
        if before != after:
            yield f"{key}: {_shown(before)} before, {_shown(after)} now"


def _shown(value: int | str | tuple[GpuCount, ...]) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{count.gpus} {count.gpu}" for count in value) or "none"
    return str(value)


def _sizes(topology: Topology) -> str:
    return ",".join(map(str, topology.block_sizes)) or "none"


def _list(label: str, nodes: set[str]) -> list[str]:
    return [f"{label}: {compress(nodes)}"] if nodes else []


def _moved(
    old_switches: dict[str, tuple[str, ...]],
    new_switches: dict[str, tuple[str, ...]],
    both: set[str],
    tier: str,
) -> list[str]:
    """Lists the nodes that were separated from their neighbours: each new switch continues the
    old one with which it shares most nodes."""
    old = {node: name for name, nodes in old_switches.items() for node in nodes if node in both}
    new = {node: name for name, nodes in new_switches.items() for node in nodes if node in both}
    shared = Counter((old[node], new[node]) for node in both if node in old and node in new)
    successor: dict[str, str] = {}
    matched_switches: set[str] = set()
    most_shared_first = sorted(shared, key=lambda pair: (-shared[pair], pair))
    for old_name, new_name in most_shared_first:
        if old_name not in successor and new_name not in matched_switches:
            successor[old_name] = new_name
            matched_switches.add(new_name)
    groups: dict[str, list[str]] = {}
    for node in both:
        old_switch = old.get(node)
        new_switch = new.get(node)
        if old_switch is None and new_switch is None:
            continue
        if old_switch is None or new_switch is None or successor.get(old_switch) != new_switch:
            move = f"{tier}: moved from {old_switch or 'nowhere'} to {new_switch or 'nowhere'}"
            groups.setdefault(move, []).append(node)
    return [f"{label}: {compress(nodes)}" for label, nodes in sorted(groups.items())]
