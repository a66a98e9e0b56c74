"""Seconds of an update that is computed on the host, from its memory or its disk (ZeRO-Offload, arXiv 2101.06840;
ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

from msgspec import UNSET

from orchestrator.plan.document import Cluster, Host, Train
from orchestrator.plan.offload import offload_of
from orchestrator.planner.model.layers import DTYPE_BYTES

from .dual import Number, value_of

#: What a cluster file that says nothing of its hosts is taken to have: two sockets of DDR4-3200 in eight channels each,
#: half of it reached; PCIe 4.0 x16 as reached by pinned copies; two NVMe drives.
ASSUMED = Host(
    memory_bytes=1 << 40,
    memory_bytes_per_s=200e9,
    link_bytes_per_s=25e9,
    disk_bytes=4 * 10**12,
    disk_bytes_per_s=6e9,
    source="assumed",
)
#: Bytes a parameter that AdamW reads and writes: gradient, and master weight and two moments both ways.
UPDATE_BYTES = 28
#: The part of them that passes the disk.
DISK_BYTES = 24


def host_of(cluster: Cluster) -> Host:
    return ASSUMED if cluster.host is UNSET else cluster.host


def offload_seconds(parameters: float, shards: int, train: Train, cluster: Cluster, byte_s: Number) -> Number:
    """Seconds that an offloaded update adds to a step, on the rank that holds `parameters`; 0.0 without one.

    Gradients go down, weights come back, and each is updated: bucket by bucket, so that the slowest of link, memory and
    disk decides, and the first has nobody beside it. The ranks of a node share its memory and its disk. `byte_s`: of a
    byte of memory where the ranks compute on CPUs.
    """
    place = offload_of(train).optimizer
    if not place:
        return 0.0
    host, mine, ranks = host_of(cluster), parameters / shards, cluster.gpus_per_node
    wide, gradient = DTYPE_BYTES[train.precision], DTYPE_BYTES[train.grad_dtype]
    if cluster.device == "cpu":
        update, down, up = mine * UPDATE_BYTES * byte_s, 2 * mine * gradient * byte_s, 2 * mine * wide * byte_s
    else:
        update = mine * UPDATE_BYTES * ranks / host.memory_bytes_per_s
        down, up = mine * gradient / host.link_bytes_per_s, mine * wide / host.link_bytes_per_s
    disk = mine * DISK_BYTES * ranks / host.disk_bytes_per_s if place == "disk" else 0.0
    slowest = max((update, up, disk), key=value_of)
    return slowest + down
