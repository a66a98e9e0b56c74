"""Cluster entry -> the cluster that a plan is placed on. Everything outside the entry is read
through `Sources`.

The caller says where measured records and running clusters are read, so nothing here knows a
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

MOST_GPUS = 64  # of one node; a larger number is no count of GPUs


class Sources(Struct, frozen=True):
    """What `resolve` may ask. With the defaults: no measured figures, no running cluster, no bad
    nodes."""

    measured: Callable[[ClusterSpec], Record | None] = lambda spec: None
    live: Callable[[str, str], Topology] | None = (
        None  # (backend, partition or label profile) -> its nodes as they are
    )
    bad_nodes: Callable[[str], Collection[str]] = (
        lambda cluster: ()
    )  # cluster name -> nodes that live ones leave out


def resolve(spec: ClusterSpec, sources: Sources = Sources()) -> Cluster:  # noqa: B008
    """The cluster with the nodes of the topology that the entry names, and with measured figures,
    where there are any.

    Raises OrchError: 65 for an entry or file that contradicts itself, 76 when too few nodes are
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
    """The free nodes of `topology_file` that have what a node of `base` has, with the figures of
    `base`.

    Of a file they are all taken, or the `topology_nodes` of them that lie closest together.
    `slurm:[partition]` and `kubernetes:[label profile]` ask the running cluster, and take the
    `nodes` idle ones that lie closest together, without those that earlier runs have found bad.
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
    if not fitting:
        kinds = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
        raise OrchError(
            f"{file}: of {len(nodes)} nodes none is free with {spec.gpus_per_node} {spec.gpu.name};"
            f" there are: {kinds}. Another entry of cluster= may describe them",
            Exit.CAPACITY,
        )
    count = spec.nodes if live else spec.topology_nodes
    if count is not UNSET:
        if count > len(fitting):
            kinds = ", ".join(f"{number} {kind}" for kind, number in left_out.items())
            few = f"{count} nodes are wanted, {len(fitting)} " + (
                "are free" if live else "are there that fit"
            )
            raise OrchError(f"{file}: {few}; left out: {kinds or 'none'}", Exit.CAPACITY)
        fitting = choose_nodes(fitting, topology, count)
    return structs.replace(with_nodes(base, fitting, topology, name=spec.name), left_out=left_out)


def _unfit(spec: ClusterSpec, machine: Machine | None, bad: bool) -> str | None:
    """Why a node cannot stand for one of the entry's, or None. Ranks are the same everywhere, so a
    job runs on nodes of one kind. What is not known of a node is taken to fit; of more GPUs than
    the entry has, the first ones are used.
    """
    if bad:
        return "found bad by earlier runs"
    if machine is None:
        return None
    if not machine.free and not (machine.reason in GPU_REASONS and spec.device == "cpu"):
        return GPU_REASONS.get(machine.reason, "out of service")
    if machine.reason in GPU_REASONS:
        return None
    offers = [GpuCount(machine.gpus, machine.gpu), *machine.other_gpus]
    for offer in offers:
        has_enough = not offer.gpus or spec.gpus_per_node <= offer.gpus <= MOST_GPUS
        if has_enough and (not offer.gpu or same_model(spec.gpu.name, offer.gpu)):
            return None
    return "with " + " and ".join(
        f"{offer.gpus or 'some'} {offer.gpu or 'GPUs'}" for offer in offers
    )
