"""The topology as orch's own file: what `orch topology import` writes and a cluster entry may name.

```yaml
schema: orch.topology/1
clusters:
  - name: h100
    tiers:                      # innermost first
      - {name: leaf, switches: {leaf0: "n[0-3]", leaf1: "n[4-9]"}}
      - {name: spine, switches: {spine: "n[0-9]"}, gbit_per_s: 400, oversubscription: 2}
    domains: {}                 # NVLink domains of several nodes
    machines:                   # optional; groups of nodes with the same hardware
      - {nodes: "n[0-8]", gpus: 8, gpu: h100, nics: 8}
      - {nodes: "n9", gpus: 8, free: false, reason: "drained: ECC"}
      - {nodes: "n10", gpus: 4, gpu: a100, other_gpus: [{gpus: 8, gpu: 2080ti}]}
```

Node lists are in Slurm's host-list form. JSON is YAML too.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from orchestrator.config import bounded_yaml
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.document import Frozen

from .hostlist import compress, expand
from .model import GpuCount, Kind, Machine, Tier, Topology, bad, check

SCHEMA = "orch.topology/1"

Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Rate = Annotated[float, Meta(ge=0)]


class TierText(Frozen):
    name: str
    switches: dict[str, str]
    gbit_per_s: Rate = 0.0
    oversubscription: Rate = 0.0


class MachineText(Frozen):
    nodes: str
    gpus: Count = 0
    gpu: str = ""
    other_gpus: tuple[GpuCount, ...] = ()
    nics: Count = 0
    free: bool = True
    reason: str = ""


class ClusterText(Frozen):
    name: str
    tiers: list[TierText] = []
    kind: Kind = "tree"
    block_size: Count = 0
    domains: dict[str, str] = {}
    machines: list[MachineText] = []


class FileText(Frozen):
    schema: str
    clusters: list[ClusterText]


def parse_document(content: str, name: str | None = None) -> Topology:
    """Returns the cluster called `name`, or the only one. Raises OrchError (65) with the key
    that is wrong."""
    import yaml

    try:
        is_json = content.lstrip().startswith("{")
        raw = (
            msgspec.json.decode(content)
            if is_json
            else bounded_yaml.load(content, bounded_yaml.MOST_VALUES)
        )
        file = msgspec.convert(raw, FileText)
    except UNREADABLE as error:
        raise bad("topology file", str(error)) from None
    except OrchError as error:
        raise bad("topology file", error.message) from None
    except yaml.YAMLError as error:
        raise bad("topology file", " ".join(str(error).split())) from None
    if file.schema != SCHEMA:
        raise bad("topology file", f"schema {file.schema!r} is not {SCHEMA!r}")
    named = {cluster.name: cluster for cluster in file.clusters}
    if len(named) != len(file.clusters) or not named:
        problem = "it names no cluster" if not named else "two clusters have the same name"
        raise bad("topology file", problem)
    if name is None and len(named) > 1:
        raise bad("topology file", f"it holds {', '.join(named)}: say which one")
    if name is not None and name not in named:
        raise bad("topology file", f"no cluster {name!r}; {did_you_mean(name, list(named))}")
    return _read(named[name] if name is not None else file.clusters[0])


def _read(described: ClusterText) -> Topology:
    source = f"topology {described.name}"
    machines: dict[str, Machine] = {}
    for index, group in enumerate(described.machines):
        values = {key: getattr(group, key) for key in Machine.__struct_fields__}
        for node in _nodes(group.nodes, source, f"machines[{index}]"):
            if node in machines:
                raise bad(source, f"machines[{index}]: node {node} is in two groups")
            machines[node] = Machine(**values)
    tiers = tuple(_tier(tier, source) for tier in described.tiers)
    domains = {
        key: tuple(_nodes(nodes, source, f"domain {key}"))
        for key, nodes in described.domains.items()
    }
    kind: Kind = described.kind if tiers else "flat"
    topology = Topology(
        kind=kind,
        tiers=tiers,
        block_size=described.block_size,
        name=described.name,
        domains=domains,
        machines=machines,
    )
    return check(topology, source)


def _tier(described: TierText, source: str) -> Tier:
    switches = {
        switch: tuple(_nodes(nodes, source, f"{described.name} {switch}"))
        for switch, nodes in described.switches.items()
    }
    return Tier(
        name=described.name,
        switches=switches,
        gbit_per_s=described.gbit_per_s,
        oversubscription=described.oversubscription,
    )


def _nodes(hosts: str, source: str, key: str) -> list[str]:
    try:
        return expand(hosts)
    except OrchError as error:
        raise bad(source, f"{key}: {error.message}") from None


def to_document(topologies: list[Topology]) -> str:
    """Returns the text of the file, YAML; `parse_document` reads the same topologies from it
    (node lists in natural order)."""
    import yaml

    clusters = [msgspec.to_builtins(_written(topology)) for topology in topologies]
    return yaml.safe_dump(
        {"schema": SCHEMA, "clusters": clusters},
        sort_keys=False,
        width=110,
    )


def _written(topology: Topology) -> ClusterText:
    groups: dict[Machine, list[str]] = {}
    for node, machine in topology.machines.items():
        groups.setdefault(machine, []).append(node)
    return ClusterText(
        name=topology.name or "cluster",
        kind=topology.kind,
        block_size=topology.block_size,
        tiers=[
            TierText(
                name=tier.name,
                switches={switch: compress(nodes) for switch, nodes in tier.switches.items()},
                gbit_per_s=tier.gbit_per_s,
                oversubscription=tier.oversubscription,
            )
            for tier in topology.tiers
        ],
        domains={name: compress(nodes) for name, nodes in topology.domains.items()},
        machines=[
            MachineText(
                nodes=compress(nodes),
                **{key: getattr(machine, key) for key in Machine.__struct_fields__},
            )
            for machine, nodes in groups.items()
        ],
    )
