"""Seconds of an update that is computed on the host, from its memory or its disk (ZeRO-Offload,
arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

from msgspec import UNSET

from orchestrator.cost.dual import Number, value_of
from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.plan.document import Cluster, Host, Train
from orchestrator.plan.offload import offload_of

#: What a cluster file that says nothing of its hosts is taken to have: two sockets of DDR4-3200 in
#: eight channels each, half of it reached; PCIe 4.0 x16 as reached by pinned copies; two NVMe
#: drives.
ASSUMED = Host(
    memory_bytes=1 << 40,
    memory_bytes_per_s=200e9,
    link_bytes_per_s=25e9,
    disk_bytes=4 * 10**12,
    disk_bytes_per_s=6e9,
    source="assumed",
)
#: Bytes a parameter that AdamW reads and writes: gradient, and master weight and two moments both
#: ways.
UPDATE_BYTES = 28
#: The part of them that passes the disk.
DISK_BYTES = 24
#: Times that pages of weights and of gradients pass it where the node's memory does not hold them:
#: written, and read by forward and backward, by the norm and the update.
PAGED = 3


def host_of(cluster: Cluster) -> Host:
    return ASSUMED if cluster.host is UNSET else cluster.host


def offload_seconds(
    parameters: float,
    shards: int,
    train: Train,
    cluster: Cluster,
    byte_s: Number,
    gpu_work_s: Number = 0.0,
) -> Number:
    """Seconds that an offloaded update adds to a step, on the rank that holds `parameters`; 0.0
    without one.

    Gradients go down, weights come back, and each is updated: bucket by bucket, so that the slowest
    of link, memory and disk decides; in memory the first has nobody beside it. The ranks of a node
    share its memory and its disk. `byte_s`: of a byte of memory where the ranks compute on CPUs
    whose hosts are not described. `beside`: seconds of GPU work in a step, which hide a delayed
    update; weights come back and gradients go down before it starts.
    """
    offload = offload_of(train)
    if not offload.optimizer:
        return 0.0
    host = host_of(cluster)
    shard = parameters / shards
    ranks = cluster.gpus_per_node
    wide = DTYPE_BYTES[train.precision]
    gradient = DTYPE_BYTES[train.grad_dtype]
    update: Number = shard * UPDATE_BYTES * ranks / host.memory_bytes_per_s
    down: Number = shard * gradient / host.link_bytes_per_s
    up: Number = shard * wide / host.link_bytes_per_s
    if cluster.device == "cpu" and cluster.host is UNSET:
        update = shard * UPDATE_BYTES * byte_s
        down = 2 * shard * gradient * byte_s
        up = 2 * shard * wide * byte_s
    if offload.delayed:
        late = update - gpu_work_s if cluster.device != "cpu" else update
        return down + up + (late if value_of(late) > 0 else 0.0)
    if offload.optimizer == "host":
        return max((update, up), key=value_of) + down
    moved = shard * DISK_BYTES
    if offload.weights and ranks * parameters * (wide + gradient) > host.memory_bytes:
        moved += parameters * PAGED * (wide + gradient)
    return max((update, up, down, moved * ranks / host.disk_bytes_per_s), key=value_of)


def activation_seconds(
    size: float, train: Train, cluster: Cluster, byte_s: Number, work_s: Number
) -> Number:
    """Seconds by which moving `size` bytes of activations one way is longer than `beside`, the work
    beside it. On CPUs the copies are made by those that compute, the disk works beside them."""
    host = host_of(cluster)
    disk = offload_of(train).activations == "disk"
    disk_seconds = size * cluster.gpus_per_node / host.disk_bytes_per_s if disk else 0.0
    slow = cluster.device == "cpu" and cluster.host is UNSET
    copies = 2 * size * byte_s if slow else size / host.link_bytes_per_s
    if cluster.device == "cpu":
        return copies + max(0.0, disk_seconds - value_of(work_s))
    late = max(disk_seconds, copies, key=value_of) - work_s
    return late if value_of(late) > 0 else 0.0
