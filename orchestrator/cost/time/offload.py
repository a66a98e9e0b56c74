"""Seconds of an update on the host, from its memory or its disk.

Sources: ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857.
"""

from __future__ import annotations

from msgspec import UNSET

from orchestrator.cost.dual import Number, value_of
from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.plan.document import Cluster, Host, Parallel, Train
from orchestrator.plan.offload import offload_of

#: The hosts of a cluster whose file does not describe them: two sockets with eight channels of
#: DDR4-3200 each, of which half the bandwidth is reached; PCIe 4.0 x16 at the rate of pinned
#: copies; two NVMe drives.
ASSUMED = Host(
    memory_bytes=1 << 40,
    memory_bytes_per_s=200e9,
    link_bytes_per_s=25e9,
    disk_bytes=4 * 10**12,
    disk_bytes_per_s=6e9,
    source="assumed",
)
#: Bytes per parameter that AdamW reads and writes: gradient, and master weight and two moments both
#: ways.
UPDATE_BYTES = 28
#: The part of these bytes that passes the disk.
DISK_BYTES = 24
#: Times that pages of weights and gradients pass the disk if the node's memory does not hold them:
#: they are written, and read by forward and backward, by the norm and the update.
PAGED = 3


def host_of(cluster: Cluster) -> Host:
    """Returns the described hosts of a cluster, or the assumed ones."""
    return ASSUMED if cluster.host is UNSET else cluster.host


def offload_seconds(
    parameters: float,
    shards: int,
    train: Train,
    cluster: Cluster,
    byte_s: Number,
    gpu_work_s: Number = 0.0,
    shards_away: bool = False,
    narrow_bytes: float = 0.0,
) -> Number:
    """Returns the seconds that an offloaded update adds to a step; 0.0 if nothing is offloaded.

    They are those of the rank that holds `parameters`. Gradients go down, weights come back, and
    each is updated bucket by bucket, so the slowest of link, memory and disk decides. In memory,
    the first copy overlaps with nothing. The ranks of a node share its memory and its disk.
    `byte_s` is the seconds per byte of memory if the ranks compute on CPUs whose hosts are not
    described. `gpu_work_s` is the seconds of GPU work per step, which hide a delayed update;
    weights come back and gradients go down before it starts. `shards_away`: both stay on the host
    between uses, and `travel_seconds` are their price. `narrow_bytes` is the bytes per parameter
    that narrow moments add to an update.
    """
    offload = offload_of(train)
    if not offload.optimizer:
        return 0.0
    host = host_of(cluster)
    shard = parameters / shards
    ranks = cluster.gpus_per_node
    wide = DTYPE_BYTES[train.precision]
    gradient = DTYPE_BYTES[train.grad_dtype]
    update_bytes = shard * (UPDATE_BYTES + narrow_bytes)
    update: Number = update_bytes * ranks / host.memory_bytes_per_s
    down: Number = shard * gradient / host.link_bytes_per_s
    up: Number = shard * wide / host.link_bytes_per_s
    if cluster.device == "cpu" and cluster.host is UNSET:
        update = update_bytes * byte_s
        down = 2 * shard * gradient * byte_s
        up = 2 * shard * wide * byte_s
    if shards_away:
        down = 0.0
        up = 0.0
    if offload.delayed:
        late = update - gpu_work_s if cluster.device != "cpu" else update
        return down + up + (late if value_of(late) > 0 else 0.0)
    if offload.optimizer == "host":
        return max((update, up), key=value_of) + down
    moved = shard * DISK_BYTES
    paged = (shard if shards_away else parameters) * (wide + gradient)
    if offload.weights and ranks * paged > host.memory_bytes:
        moved += PAGED * paged
    return max(
        (update, up, down, moved * ranks / host.disk_bytes_per_s),
        key=value_of,
    )


def travel_seconds(
    shard: float,
    parallel: Parallel,
    train: Train,
    cluster: Cluster,
    *,
    byte_s: Number,
    gpu_work_s: Number,
) -> Number:
    """Returns the seconds by which `shard` parameters on their way outlast `gpu_work_s`.

    Weights come whenever they are gathered: for the forward and the backward of each micro-batch,
    in a pipeline once a step. Gradients leave after each backward, and come back to be added to
    from the second one on. A CPU gathers weights where they are, and makes copies of gradients with
    the processors that compute.
    """
    host = host_of(cluster)
    gathers = 1 if parallel.pp > 1 else 2 * parallel.micro_batches
    weights = gathers * shard * DTYPE_BYTES[train.precision]
    gradients = (2 * parallel.micro_batches - 1) * shard * DTYPE_BYTES[train.grad_dtype]
    if cluster.device == "cpu":
        return 2 * gradients * byte_s
    late = (weights + gradients) / host.link_bytes_per_s - gpu_work_s
    return late if value_of(late) > 0 else 0.0


def activation_seconds(
    size: float,
    train: Train,
    cluster: Cluster,
    byte_s: Number,
    work_s: Number,
) -> Number:
    """Returns the seconds by which copying `size` bytes of activations one way outlasts `work_s`.

    `work_s` is the seconds of work that overlaps. On CPUs, the computing processors make the
    copies, and only the disk overlaps.
    """
    host = host_of(cluster)
    disk = offload_of(train).activations == "disk"
    disk_seconds = size * cluster.gpus_per_node / host.disk_bytes_per_s if disk else 0.0
    slow = cluster.device == "cpu" and cluster.host is UNSET
    copies = 2 * size * byte_s if slow else size / host.link_bytes_per_s
    if cluster.device == "cpu":
        return copies + max(0.0, disk_seconds - value_of(work_s))
    late = max(disk_seconds, copies, key=value_of) - work_s
    return late if value_of(late) > 0 else 0.0
