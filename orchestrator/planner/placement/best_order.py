"""The best nesting order of degrees: every order is costed, none is sampled.

Objective, lexicographic (planning.md E2): tensor-parallel groups inside an NVLink domain, then
expert-parallel groups inside one, then the predicted step time. Orders within 0.5 % of the best are
ties; of those the one that stays on the lowest levels is taken, then the one nearest the default
(TP, CP, EP, PP, DP).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import structs

from orchestrator.cost.context import CostContext
from orchestrator.cost.nesting import Candidate, candidates
from orchestrator.cost.path_cache import PathCache
from orchestrator.cost.time.step_time import predict
from orchestrator.cost.time.traffic import Traffic, step_traffic
from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.document import AXES, Axis, Parallel, Time, Train
from orchestrator.plan.domains import domains_of

from .group_packing import domain_node_orders

TIE = 0.005


def choose(rest: Sequence[Candidate], level_names: Sequence[str]) -> Candidate:
    """The best of `preferred` candidates by the objective of this module."""

    def height(candidate: Candidate) -> int:
        rank = {SELF: 0, NVLINK: 1, **{name: index + 2 for index, name in enumerate(level_names)}}
        return sum(rank[candidate.worst_level(axis)] for axis in AXES)

    fastest = math.inf
    for candidate in sorted(rest, key=lambda option: option.lower_bound_s):
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


def preferred(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that no other precedes whatever the time of a step: all are legal, or none is, and
    tensor-parallel and expert-parallel groups leave their NVLink domain in all of them, or in
    none."""
    rest = [candidate for candidate in candidates if candidate.legal] or list(candidates)
    for axis in ("tp", "ep"):
        least = min(candidate.outside_nvlink(axis) for candidate in rest)
        rest = [candidate for candidate in rest if candidate.outside_nvlink(axis) == least]
    return rest


def domain_parts(context: CostContext, parallel: Parallel) -> list[PathCache]:
    """The parts of the cluster's NVLink domains that a job may take; one where it takes all
    nodes."""
    slots = -(-parallel.world_size // context.cluster.gpus_per_node)
    if context.nodes_are_chosen or slots >= len(context.cluster.node_names):
        return [context.path_cache]
    group = domains_of(context.cluster).inner_group(
        parallel.tp, parallel.cp, parallel.ep, parallel.pp
    )
    caches = context.path_cache.parts
    if (group, slots) not in caches:
        node_orders = domain_node_orders(context.path_cache.fabric, group, slots)
        caches[group, slots] = [context.path_cache.reordered(nodes) for nodes in node_orders]
    return caches[group, slots]


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
        self.traffic = step_traffic(context.workload(parallel, train))
        work = context.work(parallel, train)
        path_caches = domain_parts(context, parallel)
        self.candidates = preferred(
            [
                candidate
                for path_cache in path_caches
                for candidate in candidates(path_cache, parallel, self.traffic, work, only)
            ]
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
        return min(candidate.lower_bound_s for candidate in self.candidates)

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
