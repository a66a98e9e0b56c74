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
    old_nodes = old.nodes
    new_nodes = new.nodes
    lines = _list("nodes gone", set(old_nodes) - set(new_nodes)) + _list(
        "nodes new", set(new_nodes) - set(old_nodes)
    )
    both = set(old_nodes) & set(new_nodes)
    if len(old.tiers) != len(new.tiers):
        lines.append(f"tiers: {len(old.tiers)} before, {len(new.tiers)} now")
    if old.block_sizes != new.block_sizes:
        lines.append(f"block sizes: {_sizes(old)} before, {_sizes(new)} now")
    for old_tier, new_tier in zip(old.tiers, new.tiers, strict=False):
        lines += _moved(old_tier.switches, new_tier.switches, both, old_tier.name)
        for label, old_figure, new_figure in (
            ("Gb/s", old_tier.gbit_per_s, new_tier.gbit_per_s),
            ("oversubscription", old_tier.oversubscription, new_tier.oversubscription),
        ):
            if old_figure != new_figure:
                lines.append(f"{old_tier.name}: {label} {old_figure:g} before, {new_figure:g} now")
    lines += _moved(old.domains, new.domains, both, "domain")
    shared_nodes = [node for node in both if node in old.machines and node in new.machines]
    groups: dict[str, list[str]] = {}
    for node in shared_nodes:
        old_machine = old.machines[node]
        new_machine = new.machines[node]
        if old_machine.free != new_machine.free:
            groups.setdefault(
                f"out of service ({new_machine.reason})" if old_machine.free else "back in service",
                [],
            ).append(node)
        for key in ("gpus", "gpu", "other_gpus", "nics"):
            old_nodes = getattr(old_machine, key)
            new_nodes = getattr(new_machine, key)
            if old_nodes != new_nodes:
                groups.setdefault(
                    f"{key}: {_shown(old_nodes)} before, {_shown(new_nodes)} now", []
                ).append(node)
    return lines + [f"{label}: {compress(nodes)}" for label, nodes in sorted(groups.items())]


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
    """Nodes that left their companions: each new switch continues the old one with which it shares
    most nodes."""
    old = {node: name for name, nodes in old_switches.items() for node in nodes if node in both}
    new = {node: name for name, nodes in new_switches.items() for node in nodes if node in both}
    shared = Counter((old[node], new[node]) for node in both if node in old and node in new)
    successor: dict[str, str] = {}
    claimed_switches: set[str] = set()
    for (old_name, new_name), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
        if old_name not in successor and new_name not in claimed_switches:
            successor[old_name] = new_name
            claimed_switches.add(new_name)
    groups: dict[str, list[str]] = {}
    for node in both:
        old_switch = old.get(node)
        new_switch = new.get(node)
        if (old_switch is None) != (new_switch is None) or (
            old_switch is not None and successor.get(old_switch) != new_switch
        ):
            groups.setdefault(
                f"{tier}: moved from {old_switch or 'nowhere'} to {new_switch or 'nowhere'}", []
            ).append(node)
    return [f"{label}: {compress(nodes)}" for label, nodes in sorted(groups.items())]
