"""Nesting orders of the axes, each with its cost.

Rank r is GPU r % gpus_per_node of node r // gpus_per_node, nodes in topology order. A nesting order
gives each rank its coordinates: the innermost axis varies fastest, so its groups are the closest
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from orchestrator.cost.time.expert_exchange import phases
from orchestrator.cost.time.fabric import Path
from orchestrator.cost.time.step_bound import lower_bound_s
from orchestrator.cost.time.step_time import StepCost, Work
from orchestrator.cost.time.traffic import PathKey, Traffic
from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.document import AXES, Axis, AxisPlacement, Parallel
from orchestrator.plan.expert_mesh import axes, expert_mesh
from orchestrator.plan.ranks import degrees

from .dual import value_of
from .path_cache import Cuts, PathCache, Paths


def orders(degrees: Mapping[str, int]) -> Iterator[tuple[Axis, ...]]:
    """Yields every distinct nesting order, the default (planning.md E1: TP, CP, EP, PP, DP) first.

    The position of an axis of degree 1 changes nothing, so such an axis keeps its default position.
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
        """`nodes` has the node in each slot; if it is empty, slots take the cluster's first nodes.

        `legal` tells whether tokens can be exchanged by domain, if the plan asks for that.
        """
        self.order = order
        self.paths = paths
        self.work = work
        self.nodes = nodes
        self.legal = legal

    @cached_property
    def cost(self) -> StepCost:
        """The cost of a step in this order."""
        return StepCost(self.work, self.paths)

    @property
    def step_s(self) -> float:
        """Seconds per step. This may simulate a pipeline, so it is computed only if needed."""
        return value_of(self.cost.step_s)

    @cached_property
    def lower_bound_s(self) -> float:
        """Lower bound of `step_s`, without simulation."""
        return lower_bound_s(self.cost)

    def worst_level(self, axis: Axis) -> str:
        """Returns the outermost level that groups of the axis cross.

        For "ep", these are the ranks that share experts, even if experts fold over other axes.
        """
        par = self.work.workload.parallel
        if axis == "ep" and expert_mesh(par).ep > 1:
            return self.paths[axes(par), "exchange"].worst_level
        return self.paths[(axis,), "ring"].worst_level

    def outside_nvlink(self, axis: Axis) -> bool:
        """Reports whether groups of the axis leave their NVLink domain."""
        return self.paths.spans_domains([axis]) or self.worst_level(axis) not in (SELF, NVLINK)


def path_keys(traffic: Sequence[Sequence[Traffic]]) -> set[PathKey]:
    """Returns the keys of the paths that the communication of all pipeline ranks takes."""
    ranks = {id(items): items for items in traffic}.values()  # Equal ranks share one list.
    return {message.key for items in ranks for message in items}


def candidates(
    path_cache: PathCache,
    parallel: Parallel,
    traffic: Sequence[Sequence[Traffic]],
    work: Work,
    only: Sequence[Axis] | None = None,
) -> list[Candidate]:
    """Returns every nesting order with its cost, the default first, or just the order `only`."""
    sizes = degrees(parallel)
    # Only virtual stages send from the last rank to the first.
    wraps = {key: key != (("pp",), "chain") or parallel.vpp > 1 for key in path_keys(traffic)}
    # Axes that send nothing have a worst level too.
    wraps |= {((axis,), "ring"): True for axis in AXES}
    wraps |= {(axes(parallel), "exchange"): True} if expert_mesh(parallel).ep > 1 else {}
    cuts = Cuts.of(parallel)
    by_domain = parallel.expert_all_to_all == "hierarchical" and expert_mesh(parallel).ep > 1
    exchanging_moe = work.workload.model.moe if by_domain else None
    return [
        Candidate(
            order,
            Paths(path_cache, order, sizes, wraps, cuts),
            work,
            nodes=path_cache.nodes,
            legal=exchanging_moe is None or path_cache.by_domain(order, parallel, exchanging_moe),
        )
        for order in ([tuple(only)] if only else orders(sizes))
    ]


def axis_placement(
    candidate: Candidate, traffic: Sequence[Sequence[Traffic]]
) -> dict[str, AxisPlacement]:
    """Returns the worst level of each axis, and the bytes per step of its busiest rank by level.

    "dp" is the gradient synchronisation, whose groups also span cp and ep (plan.groups["grad"]).
    """
    placements: dict[str, AxisPlacement] = {}
    for axis in AXES:
        busiest: dict[str, float] = {}
        for rank in traffic:
            by_level: dict[str, float] = {}
            for message in rank:
                if message.axis != axis:
                    continue
                sent_bytes = message.sent_bytes
                for path in _phases(candidate, message):
                    for level, share in path.share.items():
                        by_level[level] = by_level.get(level, 0.0) + sent_bytes * share
            busiest = max(
                busiest,
                by_level,
                key=lambda levels: sum(levels.values()),
            )
        placements[axis] = AxisPlacement(
            worst_level=candidate.worst_level(axis), bytes_per_step_by_level=busiest
        )
    return placements


def _phases(candidate: Candidate, message: Traffic) -> list[Path]:
    """Returns the paths that a message takes one after another."""
    path = candidate.paths[message.key]
    workload = candidate.work.workload
    return (
        phases(path, workload.model, workload.parallel, message.carried)
        if message.axis == "ep"
        else [path]
    )
