"""Kubernetes nodes -> topology, through profiles of labels. Pure; `kubectl get nodes -o json` is the input.

Profiles are data (`profiles.yaml` in this folder, or an ordered list of labels from the command line): vendors rename
their labels, so none of them is known to the code.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator.cluster.model import Machine, Tier, Topology, bad, check, from_paths
from orchestrator.errors import did_you_mean

WHERE = "Kubernetes nodes"
GPU, NICS = "nvidia.com/gpu", ("rdma/ib", "rdma/hca_shared_devices_a", "nvidia.com/mlnxnics", "vpc.amazonaws.com/efa")
PRODUCT = "nvidia.com/gpu.product"


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """`levels`: tier name -> labels, coarse to fine; the first label that a node carries counts."""

    levels: dict[str, list[str]] = {}
    domain: list[str] = []
    annotation: str = ""


class Taint(Struct, frozen=True):
    key: str = ""
    effect: str = ""


class Condition(Struct, frozen=True):
    type: str = ""
    status: str = ""


class Meta(Struct, frozen=True):
    name: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Spec(Struct, frozen=True):
    unschedulable: bool = False
    taints: list[Taint] = []


class Status(Struct, frozen=True):
    allocatable: dict[str, Any] = {}
    conditions: list[Condition] = []


class Node(Struct, frozen=True):
    """The fields of `v1.Node` that matter here."""

    metadata: Meta
    spec: Spec = Spec()
    status: Status = Status()


class NodeList(Struct, frozen=True):
    items: list[Node]


@cache
def profiles() -> dict[str, Profile]:
    """The shipped profiles, in the order in which they are tried."""
    path = Path(__file__).with_name("profiles.yaml")
    return _yaml(path.read_text(encoding="utf-8"))


def _yaml(text: str) -> dict[str, Profile]:
    import yaml

    return msgspec.convert(yaml.safe_load(text), dict[str, Profile])


def profile_of(levels: str) -> Profile:
    """A profile from the command line: `zone=topology.kubernetes.io/zone,rack=example.org/rack`, coarse to fine."""
    found: dict[str, list[str]] = {}
    for part in levels.split(","):
        name, equals, label = part.partition("=")
        if not equals or not name or not label or name in found:
            raise bad(
                "--levels", f"{part!r} is not NAME=LABEL with a new name; coarse to fine, as zone=LABEL,rack=LABEL"
            )
        found[name] = [label]
    return Profile(levels=found, domain=["nvidia.com/gpu.clique"])


def parse_nodes(text: str, profile: str | Profile = "auto") -> Topology:
    """`kubectl get nodes -o json` through a profile: a name, one of your own, or `auto` = the one that says most.

    Raises OrchError (65) naming the node where labels contradict each other.
    """
    try:
        nodes = msgspec.json.decode(text.encode(), type=NodeList).items
    except msgspec.DecodeError as error:
        raise bad(WHERE, str(error)) from None
    return from_nodes(nodes, profile)


def from_nodes(nodes: list[Node], profile: str | Profile = "auto") -> Topology:
    """As `parse_nodes`, of nodes that have been read."""
    names: set[str] = set()
    for index, node in enumerate(nodes):
        if node.metadata.name in names:
            raise bad(WHERE, f"items[{index}]: node {node.metadata.name} stands there twice")
        names.add(node.metadata.name)
    if not nodes:
        raise bad(WHERE, "there are none")
    if isinstance(profile, str):
        shipped = profiles()
        if profile != "auto" and profile not in shipped:
            raise bad(WHERE, f"no profile {profile!r}; {did_you_mean(profile, ['auto', *shipped])}")
        profile = shipped[_best(nodes) if profile == "auto" else profile]
    machines = {node.metadata.name: _machine(node) for node in nodes}
    if profile.annotation:
        return _annotated(nodes, profile.annotation, machines)
    used = {name: keys for name, keys in profile.levels.items() if any(_value(node, keys) for node in nodes)}
    paths = {}
    for node in nodes:
        values = tuple(_value(node, keys) for keys in used.values())
        if any(values):  # a node that lacks one level stands there alone with its kind
            paths[node.metadata.name] = tuple(value or "none" for value in values)
    domains: dict[str, list[str]] = {}
    for node in nodes:
        if value := _value(node, profile.domain):
            domains.setdefault(value, []).append(node.metadata.name)
    kind, tiers = from_paths(paths, used)
    tiers = tuple(tier for tier in tiers if any(len(nodes) > 1 for nodes in tier.switches.values()))
    kept = {name: tuple(members) for name, members in domains.items() if len(members) > 1}
    return check(Topology(kind if tiers else "flat", tiers, domains=kept, machines=machines), WHERE)


def _best(nodes: list[Node]) -> str:
    """The profile whose labels are on most nodes, more levels first; ties go to the earlier one."""

    def score(item: tuple[str, Profile]) -> tuple[int, int]:
        name, profile = item
        if profile.annotation:
            return sum(profile.annotation in node.metadata.annotations for node in nodes), 1
        keys = list(profile.levels.values())
        count = sum(bool(_value(node, keys[-1] if keys else profile.domain)) for node in nodes)
        return count, -1 if name == "generic" else sum(any(_value(node, k) for node in nodes) for k in keys)

    return max(profiles().items(), key=score)[0]


def _value(node: Node, keys: list[str]) -> str:
    labels = node.metadata.labels
    for key in keys:  # a thousand nodes are asked for each of their levels
        if value := labels.get(key):
            return value
    return ""


def _annotated(nodes: list[Node], key: str, machines: dict[str, Machine]) -> Topology:
    """Slinky's annotation: `topology:switch[:switch...]`, several separated by commas. A tree, else blocks."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for node in nodes:
        for part in filter(None, node.metadata.annotations.get(key, "").split(",")):
            name, *path = part.strip().split(":")
            if not name or not path or not all(path):
                raise bad(WHERE, f"node {node.metadata.name}: {key}={part!r} is not TOPOLOGY:SWITCH")
            found.setdefault(name, {})[node.metadata.name] = tuple(path)
    tiers: list[Tier] = []
    for name, paths in sorted(found.items(), key=lambda item: -max(map(len, item[1].values()))):
        depth = max(map(len, paths.values()))
        full = {node: (*path, *path[-1:] * (depth - len(path))) for node, path in paths.items()}
        labels = [name if depth == 1 else f"{name}{level}" for level in range(depth)]
        tiers += from_paths(full, labels)[1]
    tiers.sort(key=lambda tier: -len(tier.switches))
    return check(Topology("tree" if tiers else "flat", tuple(tiers), machines=machines), WHERE)


def _machine(node: Node) -> Machine:
    spec, status = node.spec, node.status
    ready = next((c.status for c in status.conditions if c.type == "Ready"), "True")
    taints = [t.key for t in spec.taints if t.effect in ("NoSchedule", "NoExecute") and t.key != GPU]
    reason = "cordoned" if spec.unschedulable else "" if ready == "True" else "not ready"
    return Machine(
        gpus=_count(status.allocatable.get(GPU)),
        gpu=node.metadata.labels.get(PRODUCT, ""),
        nics=max([_count(status.allocatable[name]) for name in NICS if name in status.allocatable], default=0),
        free=not reason and not taints,
        reason=reason or (f"taint {taints[0]}" if taints else ""),
    )


def _count(value: object) -> int:
    text = str(value or 0)
    return int(text) if text.isdigit() else 0
