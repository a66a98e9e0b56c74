"""Unfolds a cluster entry to explicit nodes, NVLink domains and switches, and checks them. Pure.

`resolve` adds what an entry only names: a topology file, the running cluster, measured figures.
"""

from __future__ import annotations

from msgspec import UNSET

from orchestrator.config.schema import ClusterSpec, HostSpec, LevelSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.cluster import check_cluster
from orchestrator.plan.document import Cluster, Gpu, Host, Link, SwitchLevel

GIB = 1 << 30


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
        host=UNSET if spec.host is None else _host(spec.host),
        direct_nvlink=UNSET if spec.nvlink.switched else True,
    )
    problem = check_cluster(cluster)
    if problem:
        raise OrchError(f"cluster {spec.name}: {problem}", Exit.CONFIG)
    return cluster


def _level(spec: ClusterSpec, level: LevelSpec, nics_per_gpu: float) -> SwitchLevel:
    rate = min(
        level.gbit_per_s, spec.nic.gbit_per_s
    )  # a path is no faster than the NIC it starts from
    return SwitchLevel(
        name=level.name,
        switches=_blocks(spec, f"levels.{level.name}.nodes_per_switch", level.nodes_per_switch),
        bytes_per_s=rate * 1e9 / 8 * nics_per_gpu,
        latency_s=max(level.latency_us, spec.nic.latency_us) * 1e-6,
        oversubscription=level.oversubscription,
        source=level.source,
    )


def _host(spec: HostSpec) -> Host:
    return Host(
        memory_bytes=int(spec.memory_gib * GIB),
        memory_bytes_per_s=spec.memory_gb_per_s * 1e9,
        link_bytes_per_s=spec.link_gb_per_s * 1e9,
        disk_bytes=int(spec.disk_gib * GIB),
        disk_bytes_per_s=spec.disk_gb_per_s * 1e9,
        source=spec.source,
    )


def _blocks(spec: ClusterSpec, key: str, sizes: int | list[int]) -> list[list[int]]:
    """Consecutive blocks of node indices. One number repeats (the last block may be smaller); a
    list is taken as is."""
    if isinstance(sizes, int):
        return [
            list(range(start, min(start + sizes, spec.nodes)))
            for start in range(0, spec.nodes, sizes)
        ]
    if sum(sizes) != spec.nodes:
        raise OrchError(
            f"cluster {spec.name}: {key} {sizes} sums to {sum(sizes)}, the cluster has {spec.nodes}"
            " nodes",
            Exit.CONFIG,
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
