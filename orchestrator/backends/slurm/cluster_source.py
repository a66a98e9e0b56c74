"""The cluster as it is now: what `cluster=slurm` plans on."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from orchestrator.cluster.importers.slurm import parse_topology
from orchestrator.cluster.importers.slurm_nodes import Node, parse_nodes, select
from orchestrator.cluster.model import Machine, Topology
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from .commands import Slurm


def live_topology(partition: str | None = None, slurm: Slurm | None = None) -> Topology:
    """Nodes, GPUs and states of the running cluster under its switches; free is what a job could have at once.

    Raises OrchError: 65 for an unknown partition, 76 when Slurm does not answer.
    """
    slurm = slurm or Slurm(timeout_s=30.0)
    nodes = parse_nodes(slurm.nodes())
    known = sorted({name for node in nodes for name in node.partitions})
    if partition is not None and partition not in known:
        raise OrchError(f"cluster: no partition {partition!r}; {did_you_mean(partition, known)}", Exit.CONFIG)
    machines = {
        node.name: Machine(gpus=node.gpus, gpu=node.gpu_type, free=node.free, reason="" if node.free else node.state)
        for node in select(nodes, partition)
    }
    network = parse_topology(slurm.topology())
    tiers = tuple(
        structs.replace(tier, switches={k: kept for k, v in tier.switches.items() if (kept := _kept(v, machines))})
        for tier in network.tiers
    )
    return structs.replace(network, name="slurm", machines=machines, tiers=tiers)


def _kept(names: Sequence[str], machines: dict[str, Machine]) -> tuple[str, ...]:
    return tuple(name for name in names if name in machines)


def uniform(nodes: Sequence[Node], gpus_per_node: int, gpu_type: str = "") -> list[Node]:
    """The nodes that have at least the GPUs that a plan's node has (of that type, where both say one)."""
    return [
        node
        for node in nodes
        if node.gpus >= gpus_per_node
        and (not gpu_type or not node.gpu_type or node.gpu_type.lower() == gpu_type.lower())
    ]
