"""Nesting order of the axes: every order is costed, none is sampled. Also the cost of degrees in their best order.

Rank r is GPU r % gpus_per_node of node r // gpus_per_node, nodes in topology order. A nesting order gives each rank its
coordinates: the innermost axis varies fastest, so its groups are the closest together.

Objective, lexicographic (planning.md E2): tensor-parallel groups inside an NVLink domain, then expert-parallel groups
inside one, then the predicted step time. Orders within 0.5 % of the best are ties; of those the one that stays on the
lowest levels is taken, then the one nearest the default (TP, CP, EP, PP, DP).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.document import AXES, Axis, AxisPlacement, Cluster, Matmul, Model, Parallel, Time, Train
from orchestrator.plan.domains import domains_of
from orchestrator.plan.ranks import degrees
from orchestrator.planner.cost.compute import Compute, micro_batch_compute
from orchestrator.planner.cost.dual import Number, value_of
from orchestrator.planner.cost.expert_exchange import phases
from orchestrator.planner.cost.fabric import NO_PATH, Fabric, Ints, Path, Pattern
from orchestrator.planner.cost.profile import Profile, shipped
from orchestrator.planner.cost.rates import Rates, rates
from orchestrator.planner.cost.software import SOFTWARE, Software
from orchestrator.planner.cost.step_time import StepCost, Work, predict, step_work
from orchestrator.planner.cost.traffic import DENSE_REPLICAS, PathKey, Traffic, step_traffic

from .group_packing import domain_node_orders

TIE = 0.005


def orders(degrees: Mapping[str, int]) -> Iterator[tuple[Axis, ...]]:
    """Every distinct nesting order, the default (planning.md E1: TP, CP, EP, PP, DP) first.

    The position of an axis of degree 1 changes nothing, so it keeps its default one.
    """
    moving = [axis for axis in AXES if degrees[axis] > 1]
    for permutation in itertools.permutations(moving):
        following = iter(permutation)
        yield tuple(next(following) if degrees[axis] > 1 else axis for axis in AXES)


def group_members(order: Sequence[str], degrees: Mapping[str, int], varying: Sequence[str]) -> Ints:
    """Ranks of every group in which only the `varying` axes vary: int array [groups, members].

    Members are sorted by those coordinates, the last of `varying` slowest, as in `orchestrator.plan.ranks.groups`.
    """
    outer_first = list(reversed(order))
    grid = np.arange(np.prod([degrees[axis] for axis in outer_first], dtype=int))
    grid = grid.reshape([degrees[axis] for axis in outer_first])
    fixed = [axis for axis in outer_first if axis not in varying]
    last = list(reversed(list(varying)))
    moved = grid.transpose([outer_first.index(axis) for axis in [*fixed, *last]])
    return moved.reshape(-1, int(np.prod([degrees[axis] for axis in varying], dtype=int)))


class Candidate:
    """One nesting order and its cost."""

    def __init__(self, order: tuple[Axis, ...], paths: Mapping[PathKey, Path], work: Work, nodes: tuple[int, ...] = ()):
        """`nodes`: the node in each slot; empty: the cluster's first nodes in their order."""
        self.order, self.paths, self.work, self.nodes = order, paths, work, nodes

    @cached_property
    def cost(self) -> StepCost:
        return StepCost(self.work, self.paths)

    @property
    def step_s(self) -> float:
        """Seconds of one step. May simulate a pipeline, so it is computed only where needed."""
        return value_of(self.cost.step_s)

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of `step_s`, without simulation."""
        return self.cost.lower_bound_s

    def worst_level(self, axis: Axis) -> str:
        return self.paths[(axis,), "ring"].worst_level

    def outside_nvlink(self, axis: Axis) -> bool:
        return self.worst_level(axis) not in (SELF, NVLINK)


def mirrored(members: Ints, pp: int) -> Ints:
    """Of int [groups, pp * n] over all stages: the n ranks of stage r together with those of stage pp - 1 - r, which
    hold the same layers in a bidirectional pipeline."""
    stages = members.reshape(len(members), pp, -1)
    pairs = np.concatenate([stages[:, : pp // 2], stages[:, : pp // 2 - 1 - pp : -1]], axis=2)
    return pairs.reshape(-1, pairs.shape[2])


def communicating(
    order: Sequence[Axis], sizes: Mapping[str, int], key: PathKey, zero_group: int
) -> tuple[Ints, Pattern]:
    """int [groups, n]: the groups that a key of `Traffic` means, and how they communicate."""
    varying, pattern = key
    members = group_members(order, sizes, varying)
    if "pp" in varying and len(varying) > 1:
        members = mirrored(members, sizes["pp"])
    if pattern == "shard" or pattern == "replica":
        # ranks with different experts share a group of shards; each of them has its own part of it
        zero_group //= math.prod(sizes[axis] for axis in DENSE_REPLICAS if axis not in varying)
        return split_groups(members, pattern, zero_group), "ring"
    return members, pattern


def split_groups(members: Ints, part: str, zero_group: int) -> Ints:
    """Of int [groups, n]: "shard", neighbours that share one copy; "replica", the holders of the same shard."""
    split = members.reshape(len(members), -1, zero_group)
    split = split if part == "shard" else split.swapaxes(1, 2)
    return split.reshape(-1, split.shape[2])


class PathCache:
    """Paths on one cluster, each computed once: axes with equal strides and sizes have equal groups."""

    def __init__(self, cluster: Cluster):
        self.fabric = Fabric(cluster)
        self._seen: dict[tuple[object, ...], Path] = {}
        self.nodes: tuple[int, ...] = ()  # the node in each slot, where that is not the cluster's order

    def reordered(self, nodes: Sequence[int]) -> PathCache:
        """An empty cache for the same network with `nodes` in this order."""
        other = copy.copy(self)
        other.fabric, other._seen, other.nodes = self.fabric.reordered(nodes), {}, tuple(nodes)
        return other

    def path(
        self, order: Sequence[Axis], sizes: Mapping[str, int], key: PathKey, wrap: bool = True, zero_group: int = 0
    ) -> Path:
        """Path of a pattern over all groups in which the axes of `key` vary, nested in `order`."""
        varying, pattern = key
        shape = tuple((_stride(order, sizes, axis), sizes[axis]) for axis in varying if sizes[axis] > 1)
        if not shape:
            return NO_PATH
        both = "pp" in varying and len(varying) > 1  # two stages that are the same one
        slot = (shape, pattern, both, wrap, math.prod(sizes.values()), zero_group)
        if slot not in self._seen:
            members, way = communicating(order, sizes, key, zero_group)
            members = self.fabric.standing_for_all(members, max(stride * size for stride, size in shape))
            self._seen[slot] = self.fabric.path(members, way, wrap)
        return self._seen[slot]


class Paths(Mapping[PathKey, Path]):
    """Paths of a nesting order, each found when it is asked for: most orders are out by the path of their tp groups."""

    def __init__(
        self, cache: PathCache, order: Sequence[Axis], sizes: Mapping[str, int], wanted: dict[PathKey, bool], group: int
    ):
        """`wanted`: keys, and whether the last member of a group sends to the first. `group`: as `zero_group`."""
        self.cache, self.order, self.sizes, self.wanted, self.group = cache, order, sizes, wanted, group

    def __getitem__(self, key: PathKey) -> Path:
        return self.cache.path(self.order, self.sizes, key, self.wanted[key], self.group)

    def __iter__(self) -> Iterator[PathKey]:
        return iter(self.wanted)

    def __len__(self) -> int:
        return len(self.wanted)


def path_keys(traffic: Sequence[Sequence[Traffic]]) -> set[PathKey]:
    """What paths the communication of all pipeline ranks takes."""
    ranks = {id(items): items for items in traffic}.values()  # equal ranks share one list
    return {item.key for items in ranks for item in items}


def candidates(
    path_cache: PathCache,
    parallel: Parallel,
    traffic: Sequence[Sequence[Traffic]],
    work: Work,
    only: Sequence[Axis] | None = None,
) -> list[Candidate]:
    """Every nesting order with its cost, the default order first; or just the order `only`."""
    sizes = degrees(parallel)
    # only virtual stages send from the last rank to the first
    wanted = {key: key != (("pp",), "chain") or parallel.vpp > 1 for key in path_keys(traffic)}
    wanted |= {((axis,), "ring"): True for axis in AXES}  # axes that send nothing have a worst level too
    return [
        Candidate(order, Paths(path_cache, order, sizes, wanted, parallel.zero_group), work, path_cache.nodes)
        for order in ([tuple(only)] if only else orders(sizes))
    ]


def choose(found: Sequence[Candidate], level_names: Sequence[str]) -> Candidate:
    """The best candidate by the objective of this module."""

    def height(candidate: Candidate) -> int:
        rank = {SELF: 0, NVLINK: 1, **{name: index + 2 for index, name in enumerate(level_names)}}
        return sum(rank[candidate.worst_level(axis)] for axis in AXES)

    rest = list(found)
    for axis in ("tp", "ep"):
        least = min(candidate.outside_nvlink(axis) for candidate in rest)
        rest = [candidate for candidate in rest if candidate.outside_nvlink(axis) == least]
    fastest = math.inf
    for candidate in sorted(rest, key=lambda one: one.lower_bound_s):
        if candidate.lower_bound_s > fastest * (1 + TIE):
            break
        fastest = min(fastest, candidate.step_s)
    near = fastest * (1 + TIE)
    rest = [candidate for candidate in rest if candidate.lower_bound_s <= near and candidate.step_s <= near]
    return min(rest, key=height)  # the first of equals: nearest to the default


def axis_placement(candidate: Candidate, traffic: Sequence[Sequence[Traffic]]) -> dict[str, AxisPlacement]:
    """By axis: the worst level that its groups cross, and bytes per step that its busiest rank sends, by level.

    "dp" is the gradient synchronisation, whose groups also span cp and ep (plan.groups["grad"]).
    """
    result: dict[str, AxisPlacement] = {}
    for axis in AXES:
        busiest: dict[str, float] = {}
        for rank in traffic:
            by_level: dict[str, float] = {}
            for item in rank:
                if item.axis == axis:
                    for path in _phases(candidate, item):
                        for level, share in path.share.items():
                            by_level[level] = by_level.get(level, 0.0) + item.sent_bytes * share
            busiest = max(busiest, by_level, key=lambda levels: sum(levels.values()))
        result[axis] = AxisPlacement(worst_level=candidate.worst_level(axis), bytes_per_step_by_level=busiest)
    return result


def _phases(candidate: Candidate, item: Traffic) -> list[Path]:
    path, work = candidate.paths[item.key], candidate.work
    return phases(path, work.model, work.parallel, item.carried) if item.axis == "ep" else [path]


def _stride(order: Sequence[Axis], sizes: Mapping[str, int], axis: Axis) -> int:
    stride = 1
    for inner in order[: order.index(axis)]:
        stride *= sizes[inner]
    return stride


class CostContext:
    """One model on one cluster: what the costs of all layouts share, computed once."""

    def __init__(
        self,
        cluster: Cluster,
        model: Model,
        train: Train,
        path_cache: PathCache | None = None,
        *,
        matmul: Matmul = "",
        software: Software = SOFTWARE["orch"],
        profile: Profile | None = None,
        **job: Any,
    ):
        """`path_cache`: the cluster's, if there is one already. `job`: task and slow_fabric, as `rates` takes them."""
        self.cluster, self.model, self.train, self.software = cluster, model, train, software
        self.matmul, self.profile, self.job = matmul, profile or shipped(), job
        self.path_cache = path_cache or PathCache(cluster)
        self.level_names = [level.name for level in cluster.levels]
        self._parts: dict[tuple[int, int], list[PathCache]] = {}
        self._placed = False
        self._compute: dict[tuple[object, ...], Compute] = {}
        #: the training keys with each recomputation mode
        self.trains = {mode: structs.replace(train, recompute=mode) for mode in ("none", "selective", "full")}

    @cached_property
    def rate(self) -> Rates:
        return self.rates(self.profile.values)

    def rates(self, values: Mapping[str, Number]) -> Rates:
        return rates(self.cluster, values, self.train.precision, self.software, self.matmul, **self.job)

    def on(self, cluster: Cluster, path_cache: PathCache | None = None) -> CostContext:
        """The same job on another cluster."""
        options: dict[str, Any] = {"matmul": self.matmul, "software": self.software, "profile": self.profile}
        return CostContext(cluster, self.model, self.train, path_cache, **options, **self.job)

    def training(self, train: Train) -> CostContext:
        """The same job with its training keys resolved."""
        other = copy.copy(self)
        other.train = train
        return other

    def work(self, parallel: Parallel, train: Train, rate: Rates | None = None) -> Work:
        per_node = self.cluster.gpus_per_node
        compute = None if rate else self.compute(parallel)
        return step_work(self.model, parallel, train, rate or self.rate, self.software, per_node, compute, self.cluster)

    def compute(self, parallel: Parallel) -> Compute:
        """Compute of a micro-batch, once for all layouts that give a GPU equal shards of it."""
        tokens, ring = parallel.micro_batch_size / parallel.cp, parallel.cp_method == "ring"
        key = parallel.tp, parallel.ep, parallel.sp, tokens, parallel.cp if ring else min(parallel.cp, 2)
        if key not in self._compute:
            self._compute[key] = micro_batch_compute(self.model, parallel, self.train, self.rate, self.software)
        return self._compute[key]

    def placed(self) -> CostContext:
        """The same context for a job whose nodes are chosen: the first ones of the cluster."""
        other = copy.copy(self)
        other._placed = True
        return other

    def parts(self, parallel: Parallel) -> list[PathCache]:
        """The parts of the cluster's NVLink domains that a job may take; one where it takes all nodes."""
        slots = -(-parallel.world_size // self.cluster.gpus_per_node)
        if self._placed or slots >= len(self.cluster.node_names):
            return [self.path_cache]
        group = domains_of(self.cluster).inner_group(parallel.tp, parallel.cp, parallel.ep, parallel.pp)
        if (key := (group, slots)) not in self._parts:
            nodes = domain_node_orders(self.path_cache.fabric, group, slots)
            self._parts[key] = [self.path_cache.reordered(chosen) for chosen in nodes]
        return self._parts[key]


class Solution(NamedTuple):
    """Degrees with the best nesting order for them, and what they cost."""

    parallel: Parallel
    best: Candidate
    traffic: list[list[Traffic]]
    time: Time


def solve(
    context: CostContext, parallel: Parallel, only: Sequence[Axis] | None = None, train: Train | None = None
) -> Solution:
    """`parallel` in its best nesting order (or the order `only`), on the best part of the NVLink domains.

    `train`: where its recompute is not the context's.
    """
    train = train or context.train
    traffic = step_traffic(context.model, parallel, train, context.software)
    work = context.work(parallel, train)
    found = [one for part in context.parts(parallel) for one in candidates(part, parallel, traffic, work, only)]
    best = choose(found, context.level_names)
    parallel = structs.replace(parallel, order=list(best.order))
    outside = [axis for axis in AXES if best.outside_nvlink(axis)]
    time = predict(best.cost, profile=context.profile.label, outside=outside)
    return Solution(parallel, best, traffic, time)
