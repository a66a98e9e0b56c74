"""Caches the paths of the groups of ranks that communicate in a nesting order on a cluster."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from orchestrator.cost.time.fabric import NO_PATH, Fabric, Ints, Path, Pattern
from orchestrator.cost.time.traffic import DENSE_REPLICAS, PathKey
from orchestrator.plan import hierarchy
from orchestrator.plan.document import Axis, Cluster, Moe, Parallel
from orchestrator.plan.expert_mesh import axes, tensor_ranks
from orchestrator.plan.ranks import degrees

from .numpy_import import np


def group_members(
    order: Sequence[str],
    degrees: Mapping[str, int],
    varying: Sequence[str],
) -> Ints:
    """Returns the groups in which only the `varying` axes vary: ranks, int [groups, members].

    Members are sorted by those coordinates, the last of `varying` slowest, as in
    `orchestrator.plan.ranks.groups`.
    """
    outer_first = list(reversed(order))
    shape = [degrees[axis] for axis in outer_first]
    grid = np.arange(math.prod(shape)).reshape(shape)
    fixed = [axis for axis in outer_first if axis not in varying]
    last = list(reversed(varying))
    moved = grid.transpose([outer_first.index(axis) for axis in [*fixed, *last]])
    members = math.prod(degrees[axis] for axis in varying)
    return moved.reshape(-1, members)


def mirrored(members: Ints, pp: int) -> Ints:
    """Pairs the members of mirrored stages, which hold the same layers in a bidirectional pipeline.

    `members` is int [groups, pp * n] over all stages. The n ranks of stage r are joined with those
    of stage pp - 1 - r.
    """
    stages = members.reshape(len(members), pp, -1)
    pairs = np.concatenate([stages[:, : pp // 2], stages[:, : pp // 2 - 1 - pp : -1]], axis=2)
    return pairs.reshape(-1, pairs.shape[2])


class Cuts(NamedTuple):
    """The numbers by which groups are smaller than their axes."""

    zero_group: int = 0  # ranks that share one copy of the tensors that ZeRO shards
    etp: int = 1  # ranks of tp that hold parts of the same experts

    @classmethod
    def of(cls, parallel: Parallel) -> Cuts:
        """Returns the cuts of a layout."""
        return cls(parallel.zero_group, tensor_ranks(parallel))


NO_CUTS = Cuts()


def communicating(
    order: Sequence[Axis],
    sizes: Mapping[str, int],
    key: PathKey,
    cuts: Cuts = NO_CUTS,
) -> tuple[Ints, Pattern]:
    """Returns (the groups of a key of `Traffic` as int [groups, n], their pattern)."""
    varying, pattern = key
    members = group_members(order, sizes, varying)
    zero_group = cuts.zero_group
    # A group has the ranks that hold the same part of the experts.
    if pattern == "exchange" and "tp" in varying and cuts.etp > 1:
        by_tensor_part = members.reshape(
            len(members),
            -1,
            sizes["tp"] // cuts.etp,
            cuts.etp,
        )
        members = np.moveaxis(by_tensor_part, 3, 1).reshape(len(members) * cuts.etp, -1)
    if "pp" in varying and len(varying) > 1:
        members = mirrored(members, sizes["pp"])
    if pattern == "shard" or pattern == "replica":
        # Ranks with different experts share a group of shards; each of them has its own part of it.
        zero_group //= math.prod(sizes[axis] for axis in DENSE_REPLICAS if axis not in varying)
        return split_groups(members, pattern, zero_group), "ring"
    return members, pattern


def split_groups(members: Ints, kind: str, zero_group: int) -> Ints:
    """Splits groups, int [groups, n], into parts of one `kind`.

    "shard": neighbours that share one copy. "replica": the holders of the same shard.
    """
    split = members.reshape(len(members), -1, zero_group)
    split = split if kind == "shard" else split.swapaxes(1, 2)
    return split.reshape(-1, split.shape[2])


class PathCache:
    """Paths on one cluster, each computed once for axes with equal strides and sizes."""

    def __init__(self, cluster: Cluster):
        self.fabric = Fabric(cluster)
        self._seen: dict[tuple[object, ...], Path] = {}
        self._goes: dict[tuple[object, ...], bool] = {}
        #: The node in each slot, if that is not the cluster's order.
        self.nodes: tuple[int, ...] = ()
        #: (GPUs of an inner group, nodes of the job) -> the reordered caches that are worth
        #: costing.
        self.parts: dict[tuple[int, int], list[PathCache]] = {}

    def reordered(self, nodes: Sequence[int]) -> PathCache:
        """Returns an empty cache for the same network with `nodes` in this order."""
        cache = copy.copy(self)
        cache.fabric = self.fabric.reordered(nodes)
        cache._seen = {}
        cache._goes = {}
        cache.parts = {}
        cache.nodes = tuple(nodes)
        return cache

    def path(
        self,
        order: Sequence[Axis],
        sizes: Mapping[str, int],
        key: PathKey,
        wrap: bool = True,
        cuts: Cuts = NO_CUTS,
    ) -> Path:
        """Returns the path of a pattern over all groups of `key`, with axes nested in `order`."""
        varying, pattern = key
        shape = _shape(order, sizes, varying)
        if not shape:
            return NO_PATH
        is_mirrored = "pp" in varying and len(varying) > 1  # two stages hold the same layers
        cuts = cuts if "tp" in varying else cuts._replace(etp=1)
        slot = (
            shape,
            pattern,
            is_mirrored,
            wrap,
            math.prod(sizes.values()),
            cuts,
        )
        if slot not in self._seen:
            members, communication = communicating(order, sizes, key, cuts)
            members = self.fabric.standing_for_all(members, _window(shape))
            self._seen[slot] = self.fabric.path(members, communication, wrap)
        return self._seen[slot]

    def spans_domains(
        self,
        order: Sequence[Axis],
        sizes: Mapping[str, int],
        varying: Sequence[Axis],
    ) -> bool:
        """Reports whether a group's ends are farther apart than an NVLink domain is long.

        No path is needed for that. The result is also False if domains are not alike.
        """
        last = sum(_stride(order, sizes, axis) * (sizes[axis] - 1) for axis in varying)
        return last >= self.fabric.domain_gpus

    def by_domain(self, order: Sequence[Axis], parallel: Parallel, moe: Moe) -> bool:
        """Reports whether ranks nested in `order` can exchange by domain (`plan.hierarchy`)."""
        sizes = degrees(parallel)
        varying = axes(parallel)
        cuts = Cuts.of(parallel)
        shape = _shape(order, sizes, varying)
        slot = (shape, cuts.etp, parallel.world_size)
        if slot not in self._goes:
            members, _ = communicating(order, sizes, (varying, "exchange"), cuts)
            members = self.fabric.standing_for_all(members, _window(shape))
            domains = self.fabric.block[0][np.sort(members, axis=1) // self.fabric.gpus_per_node]
            self._goes[slot] = hierarchy.problem_of(moe, domains.tolist()) is None
        return self._goes[slot]


class Paths(Mapping[PathKey, Path]):
    """The paths of a nesting order, each computed on demand.

    Most orders are excluded by the path of their tp groups.
    """

    def __init__(
        self,
        cache: PathCache,
        order: Sequence[Axis],
        sizes: Mapping[str, int],
        wraps: dict[PathKey, bool],
        cuts: Cuts,
    ):
        """`wraps` maps each key to whether the last member of a group sends to the first."""
        self.cache = cache
        self.order = order
        self.sizes = sizes
        self.wanted = wraps
        self.cuts = cuts
        self._found: dict[PathKey, Path] = {}

    def __getitem__(self, key: PathKey) -> Path:
        if key not in self._found:
            self._found[key] = self.cache.path(
                self.order,
                self.sizes,
                key,
                self.wanted[key],
                self.cuts,
            )
        return self._found[key]

    def spans_domains(self, varying: Sequence[Axis]) -> bool:
        """Reports whether groups of these axes span more than an NVLink domain."""
        return self.cache.spans_domains(self.order, self.sizes, varying)

    def __iter__(self) -> Iterator[PathKey]:
        return iter(self.wanted)

    def __len__(self) -> int:
        return len(self.wanted)


Shape = tuple[tuple[int, int], ...]  # (stride, size) of each axis with several ranks


def _shape(
    order: Sequence[Axis],
    sizes: Mapping[str, int],
    varying: Sequence[Axis],
) -> Shape:
    """Returns the shape of the groups in which the `varying` axes vary."""
    return tuple((_stride(order, sizes, axis), sizes[axis]) for axis in varying if sizes[axis] > 1)


def _window(shape: Shape) -> int:
    """Returns the number of neighbouring ranks among which each group of a shape lies."""
    return max(stride * size for stride, size in shape)


def _stride(order: Sequence[Axis], sizes: Mapping[str, int], axis: Axis) -> int:
    """Returns the distance in ranks between neighbours along an axis."""
    stride = 1
    for inner in order[: order.index(axis)]:
        stride *= sizes[inner]
    return stride
