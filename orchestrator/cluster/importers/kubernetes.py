"""Reads a topology from Kubernetes nodes, through profiles of labels. Pure; the input is `kubectl
get nodes -o json`.

Profiles are data (`profiles.yaml` in this folder, or an ordered list of labels from the command
line): vendors rename their labels, so the code knows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from orchestrator.cluster.model import MIG, SHARED, Machine, Tier, Topology, bad, check, from_paths
from orchestrator.errors import did_you_mean
from orchestrator.plan.codec import UNREADABLE

WHERE = "Kubernetes nodes"
GPU = "nvidia.com/gpu"
NICS = ("rdma/ib", "rdma/hca_shared_devices_a", "nvidia.com/mlnxnics", "vpc.amazonaws.com/efa")
PRODUCT = "nvidia.com/gpu.product"
CARDS = "nvidia.com/gpu.count"
#: Labels that describe how a GPU is shared -> values that mean that it is not. Sources:
#: NVIDIA/k8s-device-plugin docs/gpu-feature-discovery ; GKE "Share GPUs with multiple workloads".
_SHARING = {
    "nvidia.com/gpu.replicas": ("0", "1"),
    "nvidia.com/gpu.sharing-strategy": ("none",),
    "cloud.google.com/gke-gpu-sharing-strategy": ("none",),
    "cloud.google.com/gke-max-shared-clients-per-gpu": ("0", "1"),
}
#: Labels that only nodes carry whose GPUs are cut into MIG slices.
_SLICING = (
    "nvidia.com/gpu.slices.gi",
    "nvidia.com/gpu.slices.ci",
    "cloud.google.com/gke-gpu-partition-size",
)


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """`levels`: tier name -> labels, coarse to fine; the first label that a node carries counts."""

    levels: dict[str, list[str]] = {}
    domain: list[str] = []
    annotation: str = ""


class Taint(Struct, frozen=True):
    key: str = ""
    value: str = ""
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
    """Returns the shipped profiles, in the order in which they are tried."""
    path = Path(__file__).with_name("profiles.yaml")
    return _yaml(path.read_text(encoding="utf-8"))


def _yaml(content: str) -> dict[str, Profile]:
    import yaml

    return msgspec.convert(yaml.safe_load(content), dict[str, Profile])


def profile_of(levels: str) -> Profile:
    """Parses a profile from the command line:
    `zone=topology.kubernetes.io/zone,rack=example.org/rack`, coarse to fine."""
    labels: dict[str, list[str]] = {}
    for assignment in levels.split(","):
        name, equals, label = assignment.partition("=")
        if not equals or not name or not label or name in labels:
            raise bad(
                "--levels",
                f"{assignment!r} is not NAME=LABEL with a new name; coarse to fine, as"
                " zone=LABEL,rack=LABEL",
            )
        labels[name] = [label]
    return Profile(levels=labels, domain=["nvidia.com/gpu.clique"])


def parse_nodes(content: str, profile: str | Profile = "auto") -> Topology:
    """Parses `kubectl get nodes -o json` through a profile: a name, one of your own, or `auto` =
    the most specific one.

    Raises OrchError (65) with the node whose labels contradict each other.
    """
    try:
        nodes = msgspec.json.decode(content.encode(), type=NodeList).items
    except UNREADABLE as error:
        raise bad(WHERE, str(error)) from None
    return from_nodes(nodes, profile)


def gpu_nodes(nodes: Sequence[Node], gpu: str = "") -> list[Node]:
    """Returns the nodes that have the resource `gpu` ("": any that is called `.../gpu`); all of
    them if none has it."""
    return [node for node in nodes if _gpus(node, gpu)] or list(nodes)


def pick_profile(nodes: Sequence[Node], profile: str | Profile = "auto") -> Profile:
    """Returns the profile of that name; for `auto` the most specific one for these nodes.
    OrchError (65) for an unknown name."""
    if not isinstance(profile, str):
        return profile
    shipped = profiles()
    if profile != "auto" and profile not in shipped:
        raise bad(WHERE, f"no profile {profile!r}; {did_you_mean(profile, ['auto', *shipped])}")
    return shipped[_best(nodes) if profile == "auto" else profile]


def tier_labels(nodes: Sequence[Node], profile: Profile) -> dict[str, str]:
    """Maps each level to the label by which pods can ask for its switches: one that all nodes with
    a value for the level carry.

    Regions and zones are not switches: a pod that is kept in one may still run anywhere in it.
    """
    labels: dict[str, str] = {}
    for name, keys in profile.levels.items():
        if profile == profiles()["generic"]:
            continue
        labelled = [node for node in nodes if _value(node, keys)]
        for key in keys:
            if labelled and all(
                node.metadata.labels.get(key) == _value(node, keys) for node in labelled
            ):
                labels[name] = key
                break
    return labels


def from_nodes(
    nodes: list[Node],
    profile: str | Profile = "auto",
    gpu: str = "",
) -> Topology:
    """Builds the topology of nodes that have been read. Only those with GPUs are placed under
    switches, if any has some.

    A node without a label for its switch is a group of its own, because its neighbours are
    unknown.
    """
    _check_names(nodes)
    workers = gpu_nodes(nodes, gpu)
    profile = pick_profile(workers, profile)
    machines = _machines(nodes, gpu)
    if profile.annotation:
        return _annotated(workers, profile.annotation, machines)
    used = {
        name: keys
        for name, keys in profile.levels.items()
        if any(_value(node, keys) for node in workers)
    }
    paths = _paths(workers, list(used.values()), profile.domain)
    kind, tiers = from_paths(paths, used)
    tiers = tuple(tier for tier in tiers if any(len(nodes) > 1 for nodes in tier.switches.values()))
    if not tiers:
        kind = "flat"
    domains = _shared_domains(nodes, profile)
    return check(Topology(kind, tiers, domains=domains, machines=machines), WHERE)


def _check_names(nodes: list[Node]) -> None:
    """Raises OrchError (65) if there are no nodes, or two of one name."""
    names: set[str] = set()
    for index, node in enumerate(nodes):
        if node.metadata.name in names:
            raise bad(WHERE, f"items[{index}]: duplicate node {node.metadata.name}")
        names.add(node.metadata.name)
    if not nodes:
        raise bad(WHERE, "there are none")


def _machines(nodes: list[Node], gpu: str) -> dict[str, Machine]:
    """Returns the machine of each node. If some have GPUs, those without any cannot take a job."""
    machines = {node.metadata.name: _machine(node, gpu) for node in nodes}
    if not any(machine.gpus for machine in machines.values()):
        return machines
    for name, machine in machines.items():
        if not machine.gpus and not machine.reason:
            machines[name] = structs.replace(machine, free=False, reason="no GPUs")
    return machines


def _shared_domains(nodes: list[Node], profile: Profile) -> dict[str, tuple[str, ...]]:
    """Returns the NVLink domains that have several nodes."""
    domains: dict[str, list[str]] = {}
    for node in nodes:
        if value := _value(node, profile.domain):
            domains.setdefault(value, []).append(node.metadata.name)
    return {name: tuple(members) for name, members in domains.items() if len(members) > 1}


def _paths(
    nodes: Sequence[Node],
    levels: Sequence[list[str]],
    domain: list[str],
) -> dict[str, tuple[str, ...]]:
    """Returns each node's switches, coarse to fine; nodes without any label have none.

    A switch that a node does not name is the one that other nodes have above the same next finer
    switch, or above the same NVLink domain. Failing that, it is named after what is below it,
    with a `/`, which no label's value contains.
    """
    label_values = {
        node.metadata.name: [_value(node, keys) for keys in (*levels, domain)] for node in nodes
    }
    for depth in range(len(levels) - 1, -1, -1):
        above: dict[str, set[str]] = {}
        for path in label_values.values():
            if path[depth] and path[depth + 1]:
                above.setdefault(path[depth + 1], set()).add(path[depth])
        for path in label_values.values():
            candidates = above.get(path[depth + 1], set())
            if not path[depth] and len(candidates) == 1:
                path[depth] = next(iter(candidates))
    return {
        name: tuple(
            value or "/".join(("unknown", next(filter(None, path[depth + 1 :]), name)))
            for depth, value in enumerate(path[:-1])
        )
        for name, path in label_values.items()
        if any(path[:-1])
    }


def _best(nodes: Sequence[Node]) -> str:
    """Returns the most specific profile: labels of a network before NVLink domains, and these
    before zones, which every cloud has; then the one on most nodes, then the one with more
    levels; ties go to the earlier one."""

    def score(item: tuple[str, Profile]) -> tuple[int, int, int]:
        name, profile = item
        if profile.annotation:
            count = sum(profile.annotation in node.metadata.annotations for node in nodes)
            return 2 * (count > 0), count, 1
        keys = list(profile.levels.values())
        count = sum(any(_value(node, key) for key in keys or [profile.domain]) for node in nodes)
        if name == "generic" or not count:
            kind = 0
        else:
            kind = 2 if keys else 1
        return kind, count, sum(any(_value(node, key) for node in nodes) for key in keys)

    return max(profiles().items(), key=score)[0]


def _value(node: Node, keys: list[str]) -> str:
    labels = node.metadata.labels
    for key in keys:  # a plain loop, because it runs for each level of thousands of nodes
        if value := labels.get(key):
            return value
    return ""


def _annotated(nodes: list[Node], key: str, machines: dict[str, Machine]) -> Topology:
    """Reads Slinky's annotation: `topology:switch[:switch...]`, several separated by commas. A
    tree, else blocks."""
    paths_by_topology: dict[str, dict[str, tuple[str, ...]]] = {}
    for node in nodes:
        for address in filter(None, node.metadata.annotations.get(key, "").split(",")):
            name, *path = address.strip().split(":")
            if not name or not path or not all(path):
                raise bad(
                    WHERE, f"node {node.metadata.name}: {key}={address!r} is not TOPOLOGY:SWITCH"
                )
            paths_by_topology.setdefault(name, {})[node.metadata.name] = tuple(path)
    tiers: list[Tier] = []
    for name, paths in sorted(
        paths_by_topology.items(),
        key=lambda item: -max(map(len, item[1].values())),
    ):
        depth = max(map(len, paths.values()))
        full = {node: (*path, *path[-1:] * (depth - len(path))) for node, path in paths.items()}
        labels = [name if depth == 1 else f"{name}{level}" for level in range(depth)]
        tiers += from_paths(full, labels)[1]
    tiers.sort(key=lambda tier: -len(tier.switches))
    return check(
        Topology(
            "tree" if tiers else "flat",
            tuple(tiers),
            machines=machines,
        ),
        WHERE,
    )


def _gpus(node: Node, gpu: str) -> int:
    amounts = node.status.allocatable
    if gpu:
        return _count(amounts.get(gpu))
    return max(
        (_count(amount) for name, amount in amounts.items() if name.endswith("/gpu")),
        default=0,
    )


def why_not_whole(node: Node) -> str:
    """Returns why the GPUs that the node advertises are not whole ones; "" if they are, or nothing
    indicates otherwise.

    Two ranks on one card end in NCCL's "duplicate GPU", or in half the speed and memory.
    """
    labels = node.metadata.labels
    product = labels.get(PRODUCT, "").upper()
    if "-MIG-" in product or any(labels.get(key) for key in _SLICING):
        return MIG
    shared = any(labels.get(key, "") not in ("", *unshared) for key, unshared in _SHARING.items())
    shared = shared or any(
        name.endswith("/gpu.shared") and _count(n) for name, n in node.status.allocatable.items()
    )
    cards = _count(labels.get(CARDS))
    advertised = _count(node.status.allocatable.get(GPU))
    return SHARED if shared or product.endswith("-SHARED") or 0 < cards < advertised else ""


def _cards(node: Node, gpu: str) -> int:
    """Returns the GPUs of a node as it advertises them, but no more than it has."""
    advertised = _gpus(node, gpu)
    cards = _count(node.metadata.labels.get(CARDS))
    return min(advertised, cards) if cards and why_not_whole(node) else advertised


def _machine(node: Node, gpu: str) -> Machine:
    spec = node.spec
    status = node.status
    ready = next((c.status for c in status.conditions if c.type == "Ready"), "True")
    gpu_taints = (
        {gpu} if gpu else {name for name in status.allocatable if name.endswith("/gpu")} | {GPU}
    )
    taints = [
        t.key
        for t in spec.taints
        if t.effect in ("NoSchedule", "NoExecute") and t.key not in gpu_taints
    ]
    if spec.unschedulable:
        reason = "cordoned"
    elif ready != "True":
        reason = "not ready"
    else:
        reason = why_not_whole(node)
    return Machine(
        gpus=_cards(node, gpu),
        gpu=node.metadata.labels.get(PRODUCT, ""),
        nics=max(
            [_count(status.allocatable[name]) for name in NICS if name in status.allocatable],
            default=0,
        ),
        free=not reason and not taints,
        reason=reason or (f"taint {taints[0]}" if taints else ""),
    )


def _count(value: object) -> int:
    digits = str(value or 0)
    return int(digits) if digits.isdigit() else 0
