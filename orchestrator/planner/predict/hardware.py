"""Clusters from a table's names of GPUs and networks. What a name does not say is assumed, and reported as such."""

from __future__ import annotations

import re
from functools import lru_cache

from orchestrator.plan.document import Cluster, Gpu, Link, SwitchLevel

GIB = 1 << 30

#: Name -> (memory GiB, dense TFLOP/s of bf16 and fp16, of fp8, memory GB/s, NVLink GB/s one way, NIC Gb/s a GPU).
#: Data sheets of NVIDIA V100, A100, H100, H200, B200, GB200, B300 and GB300; the NIC is the reference system's.
GPUS: dict[str, tuple[float, float, float, float, float, float]] = {
    "V100-32GB": (32, 125, 125, 900, 150, 50),
    "A100-40GB": (40, 312, 312, 1555, 300, 200),
    "A100-80GB": (80, 312, 312, 2039, 300, 200),
    "H100-96GB-HBM2e": (96, 989, 1979, 2400, 450, 400),
    "H100-80GB": (79.6, 989, 1979, 3350, 450, 400),
    "H200": (141, 989, 1979, 4800, 450, 400),
    "B200": (180, 2250, 4500, 8000, 900, 400),
    "GB200": (186, 2500, 5000, 8000, 900, 400),
    "B300": (270, 2250, 4500, 8000, 900, 800),
    "GB300": (277, 2500, 5000, 8000, 900, 800),
}
SOURCE = "NVIDIA data sheets"


def gpu_of(name: str) -> tuple[str, bool]:
    """(known GPU that is the longest prefix of `name`, True), or an H100 and False."""
    matches = [known for known in GPUS if name.upper().startswith(known.upper())]
    return (max(matches, key=len), True) if matches else ("H100-80GB", False)


def nic_gbit_per_s(network: str, gpus_per_node: int) -> float | None:
    """Gb/s of network per GPU, from an interconnect's name: "8x200Gb/s", "400Gb/s per GPU", "1600Gb/s per node"."""
    if several := re.search(r"(\d+)x(\d+)\s*Gb/s", network):
        return int(several[1]) * int(several[2]) / gpus_per_node
    if one := re.search(r"(\d+)\s*Gb/s(?: per (GPU|node))?", network):
        return int(one[1]) / (gpus_per_node if one[2] == "node" else 1)
    return None


@lru_cache(maxsize=512)
def cluster_of(gpu: str, num_gpus: int, gpus_per_node: int, nic_gbit: float, domain_gpus: int) -> Cluster:
    """A cluster with one switch level over all nodes: tables say nothing about switches."""
    memory, half, fp8, hbm, nvlink, _ = GPUS[gpu]
    nodes = -(-num_gpus // gpus_per_node)
    per_domain = max(1, domain_gpus // gpus_per_node)
    return Cluster(
        name=f"{gpu}x{num_gpus}",
        device="cuda",
        node_names=[str(index) for index in range(nodes)],
        gpus_per_node=gpus_per_node,
        gpu=Gpu(
            name=gpu,
            memory_bytes=int(memory * GIB),
            peak_flops={"fp32": half * 1e12 / 8, "bf16": half * 1e12, "fp16": half * 1e12, "fp8": fp8 * 1e12},
            hbm_bytes_per_s=hbm * 1e9,
            source=SOURCE,
        ),
        nvlink_domains=[list(range(at, min(at + per_domain, nodes))) for at in range(0, nodes, per_domain)],
        nvlink=Link(bytes_per_s=nvlink * 1e9, latency_s=3.4e-6, source=SOURCE),
        nics_per_node=gpus_per_node,
        rails=gpus_per_node,
        levels=[
            SwitchLevel(
                name="fabric",
                switches=[list(range(nodes))],
                bytes_per_s=nic_gbit * 1e9 / 8,
                latency_s=1e-5,
                oversubscription=1.0,
                source=SOURCE,
            )
        ],
    )
