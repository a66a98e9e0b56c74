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

from collections.abc import Iterable, Iterator
from math import gcd, prod
from typing import Literal, NamedTuple

from msgspec import UNSET

from orchestrator.cost.time.traffic import DENSE_REPLICAS, sums_table
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import AXES, Axis, Cluster, Model, Parallel
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


class Communicator(NamedTuple):
    """A communicator of a rank, and what it connects."""

    group: Group
    collects: bool  # whether its ranks gather, scatter and sum
    peers: int  # ranks with which one exchanges messages


#: The ranks of a group on the grid of all ranks: (distance of neighbours, number) of each direction
#: in which they lie, ascending.
Grid = tuple[tuple[int, int], ...]
#: As in `trainer/comm/mesh.py`: groups with equal ranks share a communicator if they carry the
#: same. What communicates at the end of a step shares any, in this order, and comes last.
Traffic = Literal["transfers", "awaited", "gradients", "end"]
SHARED_AT_THE_END: tuple[Traffic, ...] = ("gradients", "awaited", "end")


def communicator_bytes(workload: Workload, cluster: Cluster) -> float:
    """Returns the bytes of the communicators of a rank, of those that have most.

    The axes are nested in their default order, so that the bytes do not depend on the placement.
    """
    parallel = workload.parallel
    if cluster.device == "cpu" or parallel.world_size == 1:
        return 0.0
    links = max(1, int(cluster.nvlink.bytes_per_s / LINK))
    table = PEER * MOST_OVER_NETWORK * parallel.world_size
    total = float(table)
    for group, collects, peers in communicators(workload, cluster):
        total += collective_bytes(group, links) if collects else 0.0
        total += transfer_bytes(group, peers, links) if peers else 0.0
    return total


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


def communicators(workload: Workload, cluster: Cluster) -> list[Communicator]:
    """Returns the communicators of the first rank, each once."""
    domain = cluster.gpus_per_node * min(map(len, cluster.nvlink_domains))
    by_key: dict[tuple[Traffic, Grid, range | None], Communicator] = {}
    for use in _Groups(workload, domain).uses():
        if not use.grid:
            continue
        traffics = SHARED_AT_THE_END if use.traffic == "end" else (use.traffic,)
        keys = [(traffic, use.grid, use.positions) for traffic in traffics]
        key = next((shared for shared in keys if shared in by_key), keys[-1])
        group = use.group(domain)
        before = by_key.get(
            key,
            Communicator(
                group,
                False,
                0,
            ),
        )
        by_key[key] = Communicator(
            group,
            collects=before.collects or use.peers == 0,
            peers=max(before.peers, min(use.peers, group.ranks - 1)),
        )
    return list(by_key.values())


def size_of(grid: Grid) -> int:
    """Returns the ranks of a group."""
    return prod(count for _, count in grid)


def near(grid: Grid, domain: int) -> int:
    """Returns the ranks of a group that are in the NVLink domain of the first one, of `domain`
    ranks."""
    if not grid:
        return 1
    distance, count = grid[-1]
    nearest = range(0, domain, distance)[:count]
    return sum(near(grid[:-1], domain - start) for start in nearest)


class Use(NamedTuple):
    """What a group does: exchange messages with `peers`, or collectives (0)."""

    traffic: Traffic
    grid: Grid
    peers: int = 0
    #: Which ranks of the grid, in ascending order, are its members; None: all.
    positions: range | None = None

    def group(self, domain: int) -> Group:
        """Returns the group of the first rank, in NVLink domains of `domain` ranks."""
        positions = self.positions or range(size_of(self.grid))
        # Ranks ascend, so those in the first domain come first.
        inside = range(0, min(positions.stop, near(self.grid, domain)), positions.step)
        return Group(len(positions), len(inside))


class _Groups:
    """The groups of a layout, in the order in which the trainer makes them."""

    def __init__(self, workload: Workload, domain: int):
        self.workload = workload
        self.model: Model = workload.model
        self.parallel: Parallel = workload.parallel
        self.domain = domain
        self.copies = copies_of(self.parallel)
        self.degrees = degrees(self.parallel)
        self.distance: dict[Axis, int] = {}
        distance = 1
        for axis in AXES:
            self.distance[axis] = distance
            distance *= self.degrees[axis]

    def uses(self) -> Iterator[Use]:
        """Yields what each group does."""
        parallel = self.parallel
        yield Use("awaited", self.along("tp"))
        yield from self._context()
        yield Use("transfers", self.along("pp"), peers=2)
        dense = self._replicated(DENSE_REPLICAS)
        yield Use("gradients", dense)
        key_heads = parallel.tp // self.model.kv_heads if self.model.mla is None else 1
        if key_heads > 1:
            yield Use("awaited", cut(self.along("tp"), key_heads)[0])
        yield from self._shards(dense, parallel.zero_group)
        yield from self._narrow_wire(dense, parallel.zero_group)
        if expert_mesh(parallel).ep > 1:
            yield from self._experts()
        yield Use("end", self._one_copy("tp"))
        if sums_table(self.model, parallel):
            yield Use("end", self._ends())

    def along(self, *varying: Axis) -> Grid:
        """Returns the ranks that differ in these axes."""
        return joined((self.distance[axis], self.degrees[axis]) for axis in varying)

    def _context(self) -> Iterator[Use]:
        parallel = self.parallel
        context = self.along("cp")
        moe = self.model.moe
        over_sequences = moe is not None and (
            moe.capacity_factor is not UNSET
            or (moe.balance_loss > 0.0 and moe.balance_over != "batch")
        )
        # Ulysses gathers the numbers of all tokens, by which dropout draws.
        gathers = parallel.cp_method == "allgather" or (
            parallel.cp_method == "ulysses" and self.model.dropout > 0.0
        )
        if gathers or over_sequences:
            yield Use("awaited", context)
        if parallel.cp_method != "allgather":
            # A ring sends to one neighbour and receives from the other.
            peers = parallel.cp if parallel.cp_method == "ulysses" else 1
            yield Use("awaited", context, peers)

    def _replicated(self, along: tuple[Axis, ...]) -> Grid:
        """Returns the ranks with equal parameters: those along these axes, of both copies if there
        are two on the pipeline."""
        group = self.along(*along)
        return joined([*group, *self._ends()]) if self.copies > 1 else group

    def _ends(self) -> Grid:
        """Returns the first and the last rank of a pipeline."""
        return ((self.distance["pp"] * (self.parallel.pp - 1), 2),)

    def _one_copy(self, *along: Axis) -> Grid:
        """Returns the ranks along these axes and the stages of one copy of the model."""
        stages = self.parallel.pp // self.copies
        return joined([*self.along(*along), (self.distance["pp"], stages)])

    def _shards(self, replicated: Grid, size: int) -> Iterator[Use]:
        """Yields the ranks that share one copy of the state, and those with equal shards."""
        ranks = size_of(replicated)
        if not 0 < size < ranks:
            return
        if is_run(replicated, size):
            for grid in cut(replicated, size):
                yield Use("gradients", grid)
        else:
            yield Use("gradients", replicated, positions=range(size))
            yield Use("gradients", replicated, positions=range(0, ranks, size))

    def _narrow_wire(self, replicated: Grid, size: int) -> Iterator[Use]:
        """Yields the ranks that send each other their gradients (`train.grad_wire`)."""
        if not self.workload.train.grad_wire or self.parallel.zero not in (1, 2):
            return
        ranks = size_of(replicated)
        sharers = next(
            self._shards(replicated, size),
            Use("gradients", replicated),
        )
        yield sharers._replace(peers=min(size or ranks, ranks))

    def _experts(self) -> Iterator[Use]:
        parallel = self.parallel
        mesh = expert_mesh(parallel)
        of_experts = axes(parallel)
        outside_tp = [axis for axis in of_experts if axis != "tp"]
        slices, over_tp = cut(self.along("tp"), tensor_ranks(parallel))
        experts = joined([*over_tp, *self.along(*outside_tp)])
        inside = near(experts, self.domain)
        if parallel.expert_all_to_all == "hierarchical" and inside < mesh.ep:
            yield from (Use("awaited", grid, peers=mesh.ep) for grid in cut(experts, inside))
        else:
            yield Use("awaited", experts, peers=mesh.ep)
        if parallel.sp:
            # Tokens that arrive are counted, then gathered by all that cut the same experts.
            yield Use("awaited", slices)
            yield Use("awaited", slices, peers=mesh.etp)
        if spread(parallel) == 1:
            return
        same_experts = self._replicated(replicas(parallel))
        yield Use("gradients", same_experts)
        yield from self._shards(same_experts, parallel.zero_group // spread(parallel))
        yield from self._narrow_wire(same_experts, parallel.zero_group // spread(parallel))
        yield Use("end", self._one_copy("tp", *outside_tp))


def joined(directions: Iterable[tuple[int, int]]) -> Grid:
    """Returns the directions of a group, ascending: those that continue each other are one."""
    grid: list[tuple[int, int]] = []
    for distance, count in sorted(directions):
        if grid and distance == prod(grid[-1]):
            distance, before = grid.pop()
            count *= before
        if count > 1:
            grid.append((distance, count))
    return tuple(grid)


def is_run(grid: Grid, size: int) -> bool:
    """Whether the first `size` ranks of a grid are a grid too, and so are every `size`-th."""
    for _, count in grid:
        if count % size == 0:
            return True
        if size % count:
            return False
        size //= count
    return True


def cut(grid: Grid, size: int) -> tuple[Grid, Grid]:
    """Cuts a group into runs (`is_run`) of `size` neighbours. Returns a run, and the ranks with
    equal positions in all runs."""
    run: list[tuple[int, int]] = []
    positions: list[tuple[int, int]] = []
    for distance, count in grid:
        inside = gcd(count, size)
        size //= inside
        run.append((distance, inside))
        positions.append((distance * inside, count // inside))
    return joined(run), joined(positions)
