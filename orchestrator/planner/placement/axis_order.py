"""Nesting order of the axes: every order is costed, none is sampled. Also the cost of degrees in
their best order.

Rank r is GPU r % gpus_per_node of node r // gpus_per_node, nodes in topology order. A nesting order
gives each rank its coordinates: the innermost axis varies fastest, so its groups are the closest
together.

Objective, lexicographic (planning.md E2): tensor-parallel groups inside an NVLink domain, then
expert-parallel groups inside one, then the predicted step time. Orders within 0.5 % of the best are
ties; of those the one that stays on the lowest levels is taken, then the one nearest the default
(TP, CP, EP, PP, DP).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, structs

from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.document import (
    AXES,
    Axis,
    AxisPlacement,
    Cluster,
    Matmul,
    Model,
    Parallel,
    Time,
    Train,
)
from orchestrator.plan.domains import domains_of
from orchestrator.plan.expert_mesh import axes, expert_mesh
from orchestrator.plan.ranks import degrees
from orchestrator.planner.cost.compute import Compute, micro_batch_compute
from orchestrator.planner.cost.dual import Number, value_of
from orchestrator.planner.cost.expert_exchange import phases
from orchestrator.planner.cost.fabric import Path
from orchestrator.planner.cost.imbalance import load_factor, spread_name
from orchestrator.planner.cost.profile import Profile, shipped
from orchestrator.planner.cost.rates import Rates, rates
from orchestrator.planner.cost.software import SOFTWARE, Software
from orchestrator.planner.cost.step_time import StepCost, Work, predict, step_work
from orchestrator.planner.cost.traffic import PathKey, Traffic, step_traffic

from .group_packing import domain_node_orders
from .path_cache import Cuts, PathCache, Paths

TIE = 0.005


def orders(degrees: Mapping[str, int]) -> Iterator[tuple[Axis, ...]]:
    """Every distinct nesting order, the default (planning.md E1: TP, CP, EP, PP, DP) first.

    The position of an axis of degree 1 changes nothing, so it keeps its default one.
    """
    moving = [axis for axis in AXES if degrees[axis] > 1]
    for permutation in itertools.permutations(moving):
        following = iter(permutation)
        yield tuple(next(following) if degrees[axis] > 1 else axis for axis in AXES)


class Candidate:
    """One nesting order and its cost."""

    def __init__(
        self,
        order: tuple[Axis, ...],
        paths: Paths,
        work: Work,
        nodes: tuple[int, ...] = (),
        legal: bool = True,
    ):
        """`nodes`: the node in each slot; empty: the cluster's first nodes in their order. `legal`:
        tokens can go by domain, where the plan asks for that."""
        self.order = order
        self.paths = paths
        self.work = work
        self.nodes = nodes
        self.legal = legal

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
        """Of "ep": of the ranks that share experts, also where these fold over other axes."""
        par = self.work.parallel
        if axis == "ep" and expert_mesh(par).ep > 1:
            return self.paths[axes(par), "exchange"].worst_level
        return self.paths[(axis,), "ring"].worst_level

    def outside_nvlink(self, axis: Axis) -> bool:
        return self.paths.spans_domains([axis]) or self.worst_level(axis) not in (SELF, NVLINK)


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
    wanted |= {
        ((axis,), "ring"): True for axis in AXES
    }  # axes that send nothing have a worst level too
    wanted |= {(axes(parallel), "exchange"): True} if expert_mesh(parallel).ep > 1 else {}
    cuts = Cuts.of(parallel)
    by_domain = parallel.expert_all_to_all == "hierarchical" and expert_mesh(parallel).ep > 1
    asked = work.model.moe if by_domain else None
    return [
        Candidate(
            order,
            Paths(path_cache, order, sizes, wanted, cuts),
            work,
            path_cache.nodes,
            asked is None or path_cache.by_domain(order, parallel, asked),
        )
        for order in ([tuple(only)] if only else orders(sizes))
    ]


def choose(rest: Sequence[Candidate], level_names: Sequence[str]) -> Candidate:
    """The best of `preferred` candidates by the objective of this module."""

    def height(candidate: Candidate) -> int:
        rank = {SELF: 0, NVLINK: 1, **{name: index + 2 for index, name in enumerate(level_names)}}
        return sum(rank[candidate.worst_level(axis)] for axis in AXES)

    fastest = math.inf
    for candidate in sorted(rest, key=lambda one: one.lower_bound_s):
        if candidate.lower_bound_s > fastest * (1 + TIE):
            break
        fastest = min(fastest, candidate.step_s)
    near = fastest * (1 + TIE)
    rest = [
        candidate
        for candidate in rest
        if candidate.lower_bound_s <= near and candidate.step_s <= near
    ]
    return min(rest, key=height)  # the first of equals: nearest to the default


def preferred(found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that no other precedes whatever the time of a step: all are legal, or none is, and
    tensor-parallel and expert-parallel groups leave their NVLink domain in all of them, or in
    none."""
    rest = [candidate for candidate in found if candidate.legal] or list(found)
    for axis in ("tp", "ep"):
        least = min(candidate.outside_nvlink(axis) for candidate in rest)
        rest = [candidate for candidate in rest if candidate.outside_nvlink(axis) == least]
    return rest


def axis_placement(
    candidate: Candidate, traffic: Sequence[Sequence[Traffic]]
) -> dict[str, AxisPlacement]:
    """By axis: the worst level that its groups cross, and bytes per step that its busiest rank
    sends, by level.

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
        result[axis] = AxisPlacement(
            worst_level=candidate.worst_level(axis), bytes_per_step_by_level=busiest
        )
    return result


def _phases(candidate: Candidate, item: Traffic) -> list[Path]:
    path = candidate.paths[item.key]
    work = candidate.work
    return phases(path, work.model, work.parallel, item.carried) if item.axis == "ep" else [path]


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
        imbalance: float | None = None,
        assumed: Mapping[str, float] | None = None,
        state: str = "",
        **job: Any,
    ):
        """`path_cache`: the cluster's, if there is one already. `job`: task and slow_fabric, as
        `rates` takes them. imbalance: of experts' ranks, where it is given; assumed: values of the
        profile that a plan's was made of, where they are not this one's."""
        self.cluster = cluster
        self.model = model
        self.train = train
        self.software = software
        self.matmul = matmul
        self.profile = profile or shipped()
        self.job = job
        self.imbalance = imbalance
        self.assumed = assumed or self.profile.values
        self.state = state
        self.path_cache = path_cache or PathCache(cluster)
        self.level_names = [level.name for level in cluster.levels]
        self._parts: dict[tuple[int, int], list[PathCache]] = {}
        self._placed = False
        self._compute: dict[tuple[object, ...], Compute] = {}
        #: the training keys with each recomputation mode
        self.trains = {
            mode: structs.replace(train, recompute=mode) for mode in ("none", "selective", "full")
        }

    @cached_property
    def rate(self) -> Rates:
        return self.rates(self.profile.values)

    def rates(self, values: Mapping[str, Number]) -> Rates:
        name = self.model.moe and spread_name(self.model.moe)
        spread = values[name] / self.assumed[name] if name else 1.0
        options: dict[str, Any] = {"expert_spread": spread, **self.job}
        return rates(
            self.cluster, values, self.train.precision, self.software, self.matmul, **options
        )

    def balanced(self, parallel: Parallel) -> Parallel:
        """`parallel` with the load of its fullest expert rank, as given or as the profile says."""
        moe = self.model.moe
        if moe is None or expert_mesh(parallel).ep == 1:
            return parallel
        factor = self.imbalance or load_factor(
            self.model, parallel, self.profile.values[spread_name(moe)]
        )
        return structs.replace(
            parallel, expert_imbalance=UNSET if factor == 1 else float(f"{factor:.4g}")
        )

    def on(self, cluster: Cluster, path_cache: PathCache | None = None) -> CostContext:
        """The same job on another cluster."""
        options: dict[str, Any] = {
            "matmul": self.matmul,
            "software": self.software,
            "profile": self.profile,
        }
        options |= {"imbalance": self.imbalance, "assumed": self.assumed, "state": self.state}
        return CostContext(cluster, self.model, self.train, path_cache, **options, **self.job)

    def training(self, train: Train) -> CostContext:
        """The same job with its training keys resolved."""
        other = copy.copy(self)
        other.train = train
        return other

    def work(self, parallel: Parallel, train: Train, rate: Rates | None = None) -> Work:
        per_node = self.cluster.gpus_per_node
        compute = None if rate else self.compute(parallel)
        return step_work(
            self.model,
            parallel,
            train,
            rate or self.rate,
            self.software,
            per_node,
            compute,
            self.cluster,
            self.state,
        )

    def compute(self, parallel: Parallel) -> Compute:
        """Compute of a micro-batch, once for all layouts that give a GPU equal shards of it."""
        tokens = parallel.micro_batch_size / parallel.cp
        ring = parallel.cp_method == "ring"
        experts = *expert_mesh(parallel)[:2], parallel.expert_imbalance
        key = (
            parallel.tp,
            experts,
            parallel.sp,
            tokens,
            parallel.cp if ring else min(parallel.cp, 2),
        )
        if key not in self._compute:
            self._compute[key] = micro_batch_compute(
                self.model, parallel, self.train, self.rate, self.software
            )
        return self._compute[key]

    def placed(self) -> CostContext:
        """The same context for a job whose nodes are chosen: the first ones of the cluster."""
        other = copy.copy(self)
        other._placed = True
        return other

    def parts(self, parallel: Parallel) -> list[PathCache]:
        """The parts of the cluster's NVLink domains that a job may take; one where it takes all
        nodes."""
        slots = -(-parallel.world_size // self.cluster.gpus_per_node)
        if self._placed or slots >= len(self.cluster.node_names):
            return [self.path_cache]
        group = domains_of(self.cluster).inner_group(
            parallel.tp, parallel.cp, parallel.ep, parallel.pp
        )
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


class Nestings:
    """Degrees in every nesting order that they may take, on the best part of the NVLink domains."""

    def __init__(
        self,
        context: CostContext,
        parallel: Parallel,
        only: Sequence[Axis] | None = None,
        train: Train | None = None,
    ):
        """`only`: the order that is given. `train`: where its recompute is not the context's."""
        train = train or context.train
        self.context = context
        self.parallel = parallel
        self.traffic = step_traffic(context.model, parallel, train, context.software)
        work = context.work(parallel, train)
        parts = context.parts(parallel)
        self.candidates = preferred(
            [one for part in parts for one in candidates(part, parallel, self.traffic, work, only)]
        )

    @property
    def legal(self) -> bool:
        """Whether tokens can go by domain, where the plan asks for that."""
        return self.candidates[0].legal

    def outside_nvlink(self, axis: Literal["tp", "ep"]) -> bool:
        """Whether groups of the axis leave their NVLink domain, in whatever order."""
        return self.candidates[0].outside_nvlink(axis)

    @property
    def least_s(self) -> float:
        """Lower bound of the step in seconds, without simulation."""
        return min(one.lower_bound_s for one in self.candidates)

    def solve(self) -> Solution:
        """The best order. May simulate the pipeline."""
        best = choose(self.candidates, self.context.level_names)
        parallel = structs.replace(self.parallel, order=list(best.order))
        outside = [axis for axis in AXES if best.outside_nvlink(axis)]
        time = predict(best.cost, profile=self.context.profile.label, outside=outside)
        return Solution(parallel, best, self.traffic, time)


def solve(context: CostContext, parallel: Parallel, only: Sequence[Axis] | None = None) -> Solution:
    """`parallel` in its best nesting order (or the order `only`), on the best part of the NVLink
    domains."""
    return Nestings(context, parallel, only).solve()
