"""The running cluster as Slurm's commands show it."""

from __future__ import annotations

import msgspec

from orchestrator.cluster.importers.slurm import parse_topology
from orchestrator.cluster.importers.slurm_nodes import machines, parse_nodes, select
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan import Exit

from .commands import Slurm


def read_cluster(partition: str | None = None, slurm: Slurm | None = None) -> Topology:
    """Nodes, GPUs and states of the running cluster under its switches.

    A node counts as free if a job could have it now.

    OrchError: 65 for an unknown partition, 76 when Slurm does not answer.
    """
    slurm = slurm or Slurm(timeout_s=30.0)
    nodes = parse_nodes(slurm.nodes())
    partitions = sorted({name for node in nodes for name in node.partitions})
    if partition is not None and partition not in partitions:
        raise OrchError(
            f"cluster: no partition {partition!r}; {did_you_mean(partition, partitions)}",
            Exit.CONFIG,
        )
    chosen = machines(select(nodes, partition), idle=True)
    network = parse_topology(slurm.topology())
    tiers = []
    for tier in network.tiers:
        groups = {
            name: tuple(node for node in group if node in chosen)
            for name, group in tier.switches.items()
        }
        tiers.append(
            msgspec.structs.replace(
                tier,
                switches={name: group for name, group in groups.items() if group},
            )
        )
    return msgspec.structs.replace(
        network,
        name="slurm",
        machines=chosen,
        tiers=tuple(tiers),
    )
