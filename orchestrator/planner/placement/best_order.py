"""Finds the best nesting order of degrees: every order is costed, none is sampled.

The objective is lexicographic (planning.md E2): keep tensor-parallel groups inside an NVLink
domain, then expert-parallel groups, then minimise the predicted step time. Orders within 0.5 % of
the best are ties. Among ties, the order that stays on the lowest levels is taken, then the one
nearest to the default (TP, CP, EP, PP, DP).
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
    """Returns the best of the `preferred` candidates by this module's objective."""

    def height(candidate: Candidate) -> int:
        """Returns the sum over axes of the highest level that each crosses."""
        rank = {
            SELF: 0,
            NVLINK: 1,
            **{name: index + 2 for index, name in enumerate(level_names)},
        }
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
    return min(rest, key=height)  # The first of several equals is the nearest to the default.


def preferred(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that no other one precedes, whatever the step time.

    Either all are legal or none is, and the same holds for tensor-parallel and expert-parallel
    groups that leave their NVLink domain.
    """
    rest = [candidate for candidate in candidates if candidate.legal] or list(candidates)
    for axis in ("tp", "ep"):
        least = min(candidate.outside_nvlink(axis) for candidate in rest)
        rest = [candidate for candidate in rest if candidate.outside_nvlink(axis) == least]
    return rest


def domain_parts(context: CostContext, parallel: Parallel) -> list[PathCache]:
    """Returns path caches for the parts of the cluster's NVLink domains that a job may take.

    There is a single one if the job takes all nodes.
    """
    slots = -(-parallel.world_size // context.cluster.gpus_per_node)
    if context.nodes_are_chosen or slots >= len(context.cluster.node_names):
        return [context.path_cache]
    group = domains_of(context.cluster).inner_group(
        parallel.tp,
        parallel.cp,
        parallel.ep,
        parallel.pp,
    )
    caches = context.path_cache.parts
    if (group, slots) not in caches:
        node_orders = domain_node_orders(context.path_cache.fabric, group, slots)
        caches[group, slots] = [context.path_cache.reordered(nodes) for nodes in node_orders]
    return caches[group, slots]


class Solution(NamedTuple):
    """Degrees in their best nesting order, and their cost."""

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
        """Costs every nesting order, or just the order `only`.

        `train` replaces the context's training keys, where recomputation differs.
        """
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
        """Whether tokens can be exchanged by domain, if the plan asks for that."""
        return self.candidates[0].legal

    def outside_nvlink(self, axis: Literal["tp", "ep"]) -> bool:
        """Reports whether groups of the axis leave their NVLink domain in every order."""
        return self.candidates[0].outside_nvlink(axis)

    @property
    def least_s(self) -> float:
        """Lower bound of the step in seconds, without simulation."""
        return min(candidate.lower_bound_s for candidate in self.candidates)

    def solve(self) -> Solution:
        """Returns the best order. May simulate the pipeline."""
        best = choose(self.candidates, self.context.level_names)
        parallel = structs.replace(self.parallel, order=list(best.order))
        outside = [axis for axis in AXES if best.outside_nvlink(axis)]
        time = predict(
            best.cost,
            profile=self.context.profile.label,
            outside=outside,
        )
        return Solution(parallel, best, self.traffic, time)


def solve(
    context: CostContext,
    parallel: Parallel,
    only: Sequence[Axis] | None = None,
) -> Solution:
    """Returns `parallel` in its best nesting order, on the best part of the NVLink domains.

    `only` restricts the choice to one order.
    """
    return Nestings(context, parallel, only).solve()
