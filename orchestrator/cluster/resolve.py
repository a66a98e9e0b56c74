"""Resolves a cluster entry to the cluster that a plan is placed on. Everything outside the entry is
read through `Sources`.

The caller decides where measured records and running clusters are read, so nothing here knows a
backend or a home folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, structs

from orchestrator.config.schema import LIVE, ClusterSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster

from .build import build_cluster
from .gpu_models import same_model
from .model import GPU_REASONS, GpuCount

if TYPE_CHECKING:
    from .measured import Record
    from .model import Machine, Topology

MOST_GPUS = 64  # GPUs of one node; a larger number does not count GPUs


class Sources(Struct, frozen=True):
    """The sources that `resolve` may read. With the defaults: no measured figures, no running
    cluster, no bad nodes."""

    measured: Callable[[ClusterSpec], Record | None] = lambda spec: None
    #: (backend, partition or label profile) -> the running cluster's nodes as they are
    live: Callable[[str, str], Topology] | None = None
    #: cluster name -> nodes that are left out of the running cluster
    bad_nodes: Callable[[str], Collection[str]] = lambda cluster: ()


def resolve(spec: ClusterSpec, sources: Sources = Sources()) -> Cluster:  # noqa: B008
    """Returns the cluster with the nodes of the topology that the entry names, and with measured
    figures, if there are any.

    Raises OrchError: 65 for an entry or file that contradicts itself, 76 if too few nodes are
    free.
    """
    cluster = build_cluster(spec)
    if spec.topology_file is not None:
        cluster = _with_topology(spec, cluster, sources)
    record = sources.measured(spec) if spec.measured else None
    if record is None:
        return cluster
    from .measured import with_measured

    return with_measured(cluster, record)


def _with_topology(spec: ClusterSpec, base: Cluster, sources: Sources) -> Cluster:
    """Returns the free nodes of `topology_file` that have what a node of `base` has, with the
    figures of `base`.

    From a file all of them are taken, or the `topology_nodes` that are closest together.
    `slurm:[partition]` and `kubernetes:[label profile]` ask the running cluster, and take the
    `nodes` idle ones that are closest together, without those that earlier runs have found bad.
    """
    from .nodes import choose_nodes, with_nodes

    file = str(spec.topology_file)
    live = file.startswith(LIVE)
    bad: Collection[str] = ()
    if not live:
        from .read import read

        topology = read(Path(file), name=spec.topology_name)
    else:
        assert sources.live is not None
        backend, _, selector = file.partition(":")
        topology = sources.live(backend, selector)
        bad = sources.bad_nodes(spec.name)
    nodes = topology.nodes
    reasons = {
        node: reason
        for node in nodes
        if (reason := _unfit(spec, topology.machines.get(node), node in bad))
    }
    fitting = [node for node in nodes if node not in reasons]
    left_out = dict(sorted(Counter(reasons.values()).items()))
    kinds = ", ".join(f"{number} {kind}" for kind, number in left_out.items())
    if not fitting:
        shape = f"{spec.gpus_per_node} {spec.gpu.name}"
        raise OrchError(
            f"{file}: of {len(nodes)} nodes none is free with {shape};"
            f" there are: {kinds}. Another entry of cluster= may describe them",
            Exit.CAPACITY,
        )
    count = spec.nodes if live else spec.topology_nodes
    if count is not UNSET:
        if count > len(fitting):
            supply = f"{len(fitting)} are free" if live else f"{len(fitting)} fit"
            shortage = f"{count} nodes are wanted, {supply}"
            raise OrchError(f"{file}: {shortage}; left out: {kinds or 'none'}", Exit.CAPACITY)
        fitting = choose_nodes(fitting, topology, count)
    return structs.replace(with_nodes(base, fitting, topology, name=spec.name), left_out=left_out)


def _unfit(spec: ClusterSpec, machine: Machine | None, bad: bool) -> str | None:
    """Returns why a node cannot serve as one of the entry's nodes, or None if it can.

    Ranks are the same everywhere, so a job runs on nodes of one kind. What is unknown about a
    node is assumed to fit; of more GPUs than the entry has, the first ones are used.
    """
    if bad:
        return "found bad by earlier runs"
    if machine is None:
        return None
    if not machine.free and not (machine.reason in GPU_REASONS and spec.device == "cpu"):
        return GPU_REASONS.get(machine.reason, "out of service")
    if machine.reason in GPU_REASONS:
        return None
    gpu_counts = [GpuCount(machine.gpus, machine.gpu), *machine.other_gpus]
    for count in gpu_counts:
        has_enough = not count.gpus or spec.gpus_per_node <= count.gpus <= MOST_GPUS
        if has_enough and (not count.gpu or same_model(spec.gpu.name, count.gpu)):
            return None
    return "with " + " and ".join(
        f"{count.gpus or 'some'} {count.gpu or 'GPUs'}" for count in gpu_counts
    )
