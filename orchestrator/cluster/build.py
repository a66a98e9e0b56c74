"""Topology as data: a cluster description unfolded to explicit nodes, NVLink domains and switches, and checked.

Everything later reads only the result (`orchestrator.plan.document.Cluster`), so a cluster may as well come from an
importer that lists its switches itself.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from msgspec import structs

from orchestrator.config.schema import ClusterSpec, LevelSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster, Gpu, Link, SwitchLevel

if TYPE_CHECKING:
    from .model import Machine, Topology

NVLINK = "nvlink"
SELF = "self"
GIB = 1 << 30
LIVE = ("slurm:", "kubernetes:")  # in the place of a file: the cluster as it is now


def build_cluster(spec: ClusterSpec) -> Cluster:
    """Unfold a regular (or ragged) description to explicit nodes and switches; SI units.

    Raises OrchError (exit 65) naming the level that does not add up.
    """
    nodes = spec.nodes
    width = len(str(nodes - 1))
    nics_per_gpu = spec.nic.per_node / spec.gpus_per_node
    cluster = Cluster(
        name=spec.name,
        device=spec.device,
        node_names=[f"node-{index:0{width}d}" for index in range(nodes)],
        gpus_per_node=spec.gpus_per_node,
        gpu=Gpu(
            name=spec.gpu.name,
            memory_bytes=int(spec.gpu.memory_gib * GIB),
            peak_flops={name: tflops * 1e12 for name, tflops in spec.gpu.peak_tflops.items()},
            hbm_bytes_per_s=spec.gpu.hbm_gb_per_s * 1e9,
            source=spec.gpu.source,
        ),
        nvlink_domains=_blocks(spec, "nvlink.domain_nodes", spec.nvlink.domain_nodes),
        nvlink=Link(
            bytes_per_s=spec.nvlink.gb_per_s * 1e9,
            latency_s=spec.nvlink.latency_us * 1e-6,
            source=spec.nvlink.source,
        ),
        nics_per_node=spec.nic.per_node,
        rails=spec.nic.rails,
        levels=[_level(spec, level, nics_per_gpu) for level in spec.levels],
    )
    problem = check_cluster(cluster)
    if problem:
        raise OrchError(f"cluster {spec.name}: {problem}", Exit.CONFIG)
    if spec.topology_file is not None:
        cluster = _imported(spec, cluster)
    return _as_measured(spec, cluster) if spec.measured else cluster


def _as_measured(spec: ClusterSpec, cluster: Cluster) -> Cluster:
    """With what `orch bench` has found on it, if it was run."""
    from orchestrator.run.folder import home_folder

    home = home_folder(os.environ)
    if not (home / "bench").is_dir():
        return cluster
    from .measured import read, with_measured

    record = read(spec, home)
    return with_measured(cluster, record) if record else cluster


def _imported(spec: ClusterSpec, base: Cluster) -> Cluster:
    """The free nodes of `topology_file` that have what a node of `base` has, with the figures of `base`.

    `slurm:[partition]` and `kubernetes:[label profile]` ask the running cluster, and take the `nodes` idle ones that
    lie closest together.
    """
    from .fit import choose_nodes, fit  # which checks its result here
    from .read import read

    live = next((prefix for prefix in LIVE if spec.topology_file.startswith(prefix)), None)
    if live:
        topology = _live(live, spec.topology_file.removeprefix(live))
    else:
        topology = read(FilePath(spec.topology_file), name=spec.topology_name)
    nodes = topology.nodes
    why = {node: reason for node in nodes if (reason := _unfit(spec, topology.machines.get(node)))}
    fitting, left_out = [node for node in nodes if node not in why], dict(sorted(Counter(why.values()).items()))
    if not fitting:
        kinds = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
        raise OrchError(
            f"{spec.topology_file}: of {len(nodes)} nodes none is free with {spec.gpus_per_node} {spec.gpu.name}; there"
            f" are: {kinds}. Another entry of cluster= may describe them",
            Exit.CAPACITY,
        )
    if live:
        fitting = choose_nodes(fitting, topology, spec.nodes)
    return structs.replace(fit(base, fitting, topology, name=spec.name), left_out=left_out)


def _unfit(spec: ClusterSpec, machine: Machine | None) -> str | None:
    """What a machine is, where it cannot stand for one of the entry's: ranks are the same everywhere, so a job runs on
    nodes of one kind. What is not known is taken to fit; of more GPUs than the entry has, the first ones are used.
    """
    if machine is None:
        return None
    if not machine.free:
        return "out of service"
    fewer = machine.gpus and machine.gpus < spec.gpus_per_node
    other = machine.gpu and spec.gpu.name.split("-")[0].lower() not in machine.gpu.lower()
    return f"with {machine.gpus or 'some'} {machine.gpu or 'GPUs'}" if fewer or other else None


def _live(prefix: str, which: str) -> Topology:
    from orchestrator.backends.base import TopologySource, get_backend

    backend = get_backend(prefix.removesuffix(":"))
    assert isinstance(backend, TopologySource)
    return backend.live_topology(which)


def _level(spec: ClusterSpec, level: LevelSpec, nics_per_gpu: float) -> SwitchLevel:
    rate = min(level.gbit_per_s, spec.nic.gbit_per_s)  # a path is no faster than the NIC it starts from
    return SwitchLevel(
        name=level.name,
        switches=_blocks(spec, f"levels.{level.name}.nodes_per_switch", level.nodes_per_switch),
        bytes_per_s=rate * 1e9 / 8 * nics_per_gpu,
        latency_s=max(level.latency_us, spec.nic.latency_us) * 1e-6,
        oversubscription=level.oversubscription,
        source=level.source,
    )


def _blocks(spec: ClusterSpec, key: str, sizes: int | list[int]) -> list[list[int]]:
    """Consecutive blocks of node indices. One number repeats (the last block may be smaller); a list is taken as is."""
    if isinstance(sizes, int):
        return [list(range(start, min(start + sizes, spec.nodes))) for start in range(0, spec.nodes, sizes)]
    if sum(sizes) != spec.nodes:
        raise OrchError(
            f"cluster {spec.name}: {key} {sizes} sums to {sum(sizes)}, the cluster has {spec.nodes} nodes", Exit.CONFIG
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


def check_cluster(cluster: Cluster) -> str | None:
    """None, or one line naming the first contradiction: names, partition, nesting, a common top.

    Nesting is what makes "the level where two nodes meet" well defined: two nodes under one switch stay together on
    every level above.
    """
    nodes = len(cluster.node_names)
    seen: set[str] = set()
    for name in cluster.node_names:
        if name in seen:
            return f"node {name!r} is named twice"
        seen.add(name)
    names = [level.name for level in cluster.levels]
    for name in names:
        if name in (NVLINK, SELF) or names.count(name) > 1:
            return f"level name {name!r} is taken (names must differ, and {NVLINK!r} and {SELF!r} are reserved)"
    tiers = [(NVLINK, cluster.nvlink_domains), *((level.name, level.switches) for level in cluster.levels)]
    below: tuple[str, list[list[int]]] | None = None
    for name, blocks in tiers:
        owner: dict[int, int] = {}
        for index, block in enumerate(blocks):
            for node in block:
                if not 0 <= node < nodes:
                    return f"{name} block {index} lists node {node}, the nodes are 0..{nodes - 1}"
                if node in owner:
                    return f"node {node} is in {name} blocks {owner[node]} and {index}"
                owner[node] = index
        if len(owner) != nodes:
            missing = next(node for node in range(nodes) if node not in owner)
            return f"node {missing} is in no {name} block"
        if below is not None:
            for index, block in enumerate(below[1]):
                if len({owner[node] for node in block}) > 1:
                    return f"{below[0]} block {index} is split over several {name} switches: levels must nest"
        below = name, blocks
    if nodes > 1 and len(tiers[-1][1]) != 1:
        return f"nodes meet nowhere: the last level, {tiers[-1][0]}, has {len(tiers[-1][1])} blocks and must have one"
    return None


def level_between(cluster: Cluster, node_a: int, node_b: int) -> str:
    """Name of the tier on which two nodes meet: "nvlink" inside one domain, else the lowest common switch's level."""
    for name, blocks in [(NVLINK, cluster.nvlink_domains), *((lv.name, lv.switches) for lv in cluster.levels)]:
        if any(node_a in block and node_b in block for block in blocks):
            return name
    raise ValueError(f"nodes {node_a} and {node_b} have no common switch")


def domain_gpus(cluster: Cluster) -> int:
    """GPUs in the smallest NVLink domain: what a tensor-parallel group must fit into."""
    return min(len(domain) for domain in cluster.nvlink_domains) * cluster.gpus_per_node
