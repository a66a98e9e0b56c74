"""Bytes of NCCL's communicators on a rank, which no tensor holds, for the groups of a layout.

From the source of NCCL 2.22 to 2.30 with its default settings (github.com/NVIDIA/nccl). A
communicator connects two ranks when an operation first needs it, over all of its channels at once
(`src/group.cc`). On each channel a rank holds, for a neighbour that it sends to and one that it
receives from, buffers of the three protocols (`src/init.cc`: LL 0.5 MiB, LL128 4.69 MiB, Simple
4 MiB), in pages of 2 MiB: inside an NVLink domain 10 MiB to receive and a page of flags to send
(`src/transport/p2p.cc`), over the network 10 MiB for each (`src/transport/net.cc`). The sizes 10
and 2 MiB and 32 channels per pair of H100s are seen in issue 1685: of the 3.3 GB that its
all-to-all of 8 ranks took, these are 2.8.

Rings send one way; the trees of sums send both ways over the same neighbours. Not counted: the
buffers of sums in switches (NVLS), and exchanges of whole matrices (Muon).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.cost.time.traffic import DENSE_REPLICAS, sums_table
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import AXES, Axis, Cluster, Parallel
from orchestrator.plan.expert_mesh import (
    axes,
    expert_mesh,
    replicas,
    spread,
    tensor_ranks,
)
from orchestrator.plan.ranks import degrees
from orchestrator.plan.schedules import copies_of

MIB = 1 << 20
NEAR = 12 * MIB  # of a channel, to one neighbour and from one, inside an NVLink domain
FAR = 20 * MIB  # over the network
LINK = 25e9  # bytes/s of one NVLink in one direction
#: The most channels of a collective inside a domain, and of point-to-point transfers between two of
#: its ranks: as logged on H100s (issue 1781).
MOST = 24
MOST_OF_A_PAIR = 32
#: Channels of a collective over the network: 4 for each rank of a node, up to 16
#: (`src/graph/connect.cc`; 2 x 2 ranks log 8 in issue 1189).
OF_A_RANK = 4
MOST_OVER_NETWORK = 16
#: Channels between two ranks of a group that crosses the network (`src/graph/paths.cc`: 14 GB/s
#: each, on a NIC of 400 Gbit/s); they are halved while all peers do not fit at once.
OF_A_DISTANT_PAIR = 4
PEERS_AT_ONCE = 8
#: What all transfers over the network share, to send and to receive: 16 pieces of 128 KiB of each
#: channel.
POOLS = 2 * MOST_OVER_NETWORK * 16 * (MIB // 8)
#: What each channel knows of each rank of the world.
PEER = 512


class Group(NamedTuple):
    """A group of ranks, as one of them sees it."""

    ranks: int
    near: int  # ranks in its own NVLink domain, itself included


def communicator_bytes(workload: Workload, cluster: Cluster) -> float:
    """Returns the bytes of the communicators of a rank, of those that have most.

    The axes are nested in their default order, so that the bytes do not depend on the placement.
    """
    parallel = workload.parallel
    if cluster.device == "cpu" or parallel.world_size == 1:
        return 0.0
    links = max(1, int(cluster.nvlink.bytes_per_s / LINK))
    collectives = sum(
        collective_bytes(group, links) for group in collective_groups(workload, cluster)
    )
    transfers = sum(
        transfer_bytes(group, min(group.ranks - 1, peers), links)
        for group, peers in exchange_groups(workload, cluster)
    )
    table = PEER * MOST_OVER_NETWORK * parallel.world_size
    return collectives + transfers + table


def collective_bytes(group: Group, links: int) -> float:
    """Returns the bytes of a communicator whose ranks gather, scatter and sum."""
    if group.ranks == 1:
        return 0.0
    directions = 1 if group.ranks == 2 else 2
    if group.near == group.ranks:
        return directions * min(MOST, 2 * links) * NEAR
    # One rank of a domain sends to the next domain on each channel.
    per_channel = NEAR + (FAR - NEAR) / group.near
    return directions * min(MOST_OVER_NETWORK, OF_A_RANK * group.near) * per_channel


def transfer_bytes(group: Group, peers: int, links: int) -> float:
    """Returns the bytes of a communicator for transfers to and from `peers` ranks of it."""
    if group.ranks == 1:
        return 0.0
    near_peers = min(peers, group.near - 1)
    if group.near == group.ranks:
        return near_peers * min(MOST_OF_A_PAIR, _power_of_two(2 * links)) * NEAR
    channels = OF_A_DISTANT_PAIR
    while channels > 1 and channels * -(-group.ranks // PEERS_AT_ONCE) > MOST_OVER_NETWORK:
        channels //= 2
    return near_peers * channels * NEAR + POOLS


def _power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def collective_groups(workload: Workload, cluster: Cluster) -> Iterator[Group]:
    """Yields the groups that gather, scatter and sum, those with equal ranks once."""
    model = workload.model
    parallel = workload.parallel
    sizes = _Sizes(parallel, cluster)
    copies = copies_of(parallel)
    dense = sizes.replicas(DENSE_REPLICAS, copies)
    groups = {
        sizes.varying("tp"): sizes.along("tp"),
        sizes.varying(*DENSE_REPLICAS): dense,
    }
    if parallel.pp > 1:  # norms are summed over a copy of the model
        groups[sizes.varying("tp", "pp")] = sizes.along("tp", "pp", shared=copies)
    if parallel.cp_method == "allgather":
        groups.setdefault(sizes.varying("cp"), sizes.along("cp"))
    yield from _parts(dense, parallel.zero_group)
    if expert_mesh(parallel).ep > 1 and spread(parallel) > 1:
        same_experts = sizes.replicas(replicas(parallel), copies)
        groups.setdefault(sizes.varying(*replicas(parallel)), same_experts)
        yield from _parts(same_experts, parallel.zero_group // spread(parallel))
        all_experts = ("tp", *axes(parallel), "pp")
        groups.setdefault(sizes.varying(*all_experts), sizes.along(*all_experts, shared=copies))
    yield from groups.values()
    key_heads = parallel.tp // model.kv_heads if model.mla is None else 1
    if 1 < key_heads < parallel.tp:
        yield sizes.cut(("tp",), key_heads)
    if sums_table(model, parallel):
        yield Group(2, 1 + (sizes.along("pp").near == parallel.pp))


def _parts(replicated: Group, shard: int) -> Iterator[Group]:
    """Yields the ranks that share one copy of the state, and those with equal shards."""
    if not 1 < shard < replicated.ranks:
        return
    yield Group(shard, min(shard, replicated.near))
    yield Group(replicated.ranks // shard, max(1, replicated.near // shard))


def exchange_groups(workload: Workload, cluster: Cluster) -> Iterator[tuple[Group, int]]:
    """Yields the groups with transfers between two ranks, and how many ranks one exchanges with."""
    parallel = workload.parallel
    sizes = _Sizes(parallel, cluster)
    yield sizes.along("pp"), 2
    if parallel.cp_method != "allgather":
        # A ring sends to one neighbour and receives from the other.
        yield sizes.along("cp"), parallel.cp if parallel.cp_method == "ulysses" else 1
    mesh = expert_mesh(parallel)
    if mesh.ep == 1:
        return
    of_experts = axes(parallel)
    apart = tensor_ranks(parallel) if "tp" in of_experts else 1
    experts = sizes.cut(of_experts, mesh.ep, stride=apart)
    if parallel.expert_all_to_all == "hierarchical" and experts.near < experts.ranks:
        yield Group(experts.near, experts.near), experts.near
        yield Group(experts.ranks // experts.near, 1), experts.ranks
    else:
        yield experts, experts.ranks
    if 1 < mesh.etp < parallel.tp:
        yield sizes.cut(("tp",), mesh.etp), mesh.etp


class _Sizes:
    """Sizes of the groups of a layout on a cluster."""

    def __init__(self, parallel: Parallel, cluster: Cluster):
        self.degrees = degrees(parallel)
        self.domain = cluster.gpus_per_node * min(map(len, cluster.nvlink_domains))

    def varying(self, *along: Axis) -> frozenset[Axis]:
        """Returns those of the axes along which there are several ranks."""
        return frozenset(axis for axis in along if self.degrees[axis] > 1)

    def along(self, *varying: Axis, shared: int = 1) -> Group:
        """Returns the group of the ranks that differ in these axes, or a `shared`-th part of it."""
        ranks = 1
        near = 1
        stride = 1
        for axis in AXES:
            degree = self.degrees[axis]
            if axis in varying:
                ranks *= degree
                near *= max(1, min(degree, self.domain // stride))
            stride *= degree
        return Group(ranks // shared, min(near, ranks // shared))

    def replicas(self, along: tuple[Axis, ...], copies: int) -> Group:
        """Returns the ranks with equal parameters: those along these axes, of all copies on the
        pipeline."""
        group = self.along(*along)
        pipeline = self.along("pp")
        is_near = pipeline.near == pipeline.ranks
        return Group(copies * group.ranks, group.near * (copies if is_near else 1))

    def cut(self, varying: tuple[Axis, ...], ranks: int, stride: int = 1) -> Group:
        """Returns a group of `ranks` of those that differ in these axes, `stride` apart."""
        near = self.along(*varying).near
        return Group(ranks, min(ranks, max(1, near // stride)))
