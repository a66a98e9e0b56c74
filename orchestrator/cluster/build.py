"""Unfolds a cluster entry to explicit nodes, NVLink domains and switches, and checks them. Pure.

`resolve` adds what an entry only names: a topology file, the running cluster, measured figures.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from orchestrator.config.schema import ClusterSpec, HostSpec, LevelSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.cluster import check_cluster
from orchestrator.plan.document import Cluster, Gpu, Host, Link, SwitchLevel

GIB = 1 << 30


def build_cluster(spec: ClusterSpec) -> Cluster:
    """Unfolds a regular (or ragged) description into explicit nodes and switches, in SI units.

    Raises OrchError (exit 65) with the level that does not add up.
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
        host=_host(spec.host),
        direct_nvlink=UNSET if spec.nvlink.switched else True,
    )
    if problem := check_cluster(cluster):
        raise OrchError(f"cluster {spec.name}: {problem}", Exit.CONFIG)
    return cluster


def _level(spec: ClusterSpec, level: LevelSpec, nics_per_gpu: float) -> SwitchLevel:
    # A path is no faster than the NIC that it starts from.
    rate = min(level.gbit_per_s, spec.nic.gbit_per_s)
    return SwitchLevel(
        name=level.name,
        switches=_blocks(spec, f"levels.{level.name}.nodes_per_switch", level.nodes_per_switch),
        bytes_per_s=rate * 1e9 / 8 * nics_per_gpu,
        latency_s=max(level.latency_us, spec.nic.latency_us) * 1e-6,
        oversubscription=level.oversubscription,
        source=level.source,
    )


def _host(spec: HostSpec | None) -> Host | UnsetType:
    if spec is None:
        return UNSET
    return Host(
        memory_bytes=int(spec.memory_gib * GIB),
        memory_bytes_per_s=spec.memory_gb_per_s * 1e9,
        link_bytes_per_s=spec.link_gb_per_s * 1e9,
        disk_bytes=int(spec.disk_gib * GIB),
        disk_bytes_per_s=spec.disk_gb_per_s * 1e9,
        source=spec.source,
    )


def _blocks(spec: ClusterSpec, key: str, sizes: int | list[int]) -> list[list[int]]:
    """Returns consecutive blocks of node indices. A number is the size of every block (the last
    may be smaller); a list gives the size of each."""
    if isinstance(sizes, int):
        return [
            list(range(start, min(start + sizes, spec.nodes)))
            for start in range(0, spec.nodes, sizes)
        ]
    if sum(sizes) != spec.nodes:
        sums = f"{key} {sizes} sums to {sum(sizes)}, the cluster has {spec.nodes} nodes"
        raise OrchError(f"cluster {spec.name}: {sums}", Exit.CONFIG)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
