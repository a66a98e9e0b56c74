"""Assigns nodes to the node slots of a job, and measures how far the assignment is from optimal.

Ranks fill node slots 0, 1, 2, ...; a placement assigns a node to each slot. It matters if switches
are ragged or fragmented, or if there are more nodes than needed.

The objective is lexicographic (planning.md E2): keep tensor-parallel groups inside an NVLink
domain, then expert-parallel groups. Then minimise the predicted step, which includes the load of
shared uplinks, then all communication seconds, hidden or not, then the switch levels that the axes
cross.

Few nodes are placed exactly: every placement up to symmetry is costed. Many nodes are placed by
packing whole groups under switches, for every nesting order, and then by swaps. The scheduler's own
order is always a candidate, so the result is never worse. `bound_s` holds for every placement, so
the gap to it limits the gain of a better one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.config.validate import with_defaults
from orchestrator.cost.context import CostContext
from orchestrator.cost.dual import value_of
from orchestrator.cost.model.layers import resolve
from orchestrator.cost.nesting import Candidate, candidates, orders, path_keys
from orchestrator.cost.numpy_import import np
from orchestrator.cost.path_cache import PathCache
from orchestrator.cost.profile import Profile
from orchestrator.cost.software import software_named
from orchestrator.cost.time import collective
from orchestrator.cost.time.step_time import Work
from orchestrator.cost.time.traffic import Traffic, step_traffic
from orchestrator.plan.document import AXES, Axis, Certificate, Cluster, Parallel
from orchestrator.plan.domains import cut, domains_of, usable_nodes
from orchestrator.plan.expert_mesh import axes
from orchestrator.plan.ranks import degrees
from orchestrator.planner.job import make_train

from .best_order import domain_parts, solve
from .group_packing import distinct_node_orders, domain_node_orders, packed_node_orders
from .lower_bound import placement_lower_bound

EXACT_NODES = 8
EXACT_PLACEMENTS = 6000  # the most placements, up to symmetry, that are all costed
MAX_SWAP_NODES = 64
MAX_SWAPS = 400  # the most placements that are costed by swaps
SWAP_GAIN = 1e-4  # share of the step that a swap must save
CLOSE = 1e-9  # relative difference below which two steps count as equal


class PlacementScore(NamedTuple):
    """A score that is compared field by field; smaller is better."""

    misfit: bool  # the plan asks for an exchange by domain, which is impossible
    tp_outside: bool  # tensor-parallel groups leave their NVLink domain
    ep_outside: bool
    step_s: float
    busy_s: float  # all communication, hidden or not, of the busiest rank
    height: int  # sum over axes of the highest level that they cross
    order: int  # index of the nesting order, the default first


class ScoredPlacement(NamedTuple):
    """A placement with its best nesting order."""

    nodes: tuple[int, ...]  # index of the node in each slot
    candidate: Candidate
    score: PlacementScore

    def is_optimal(self, bound_s: float) -> bool:
        """Reports whether no other placement can be better, if none is faster than `bound_s`."""
        score = self.score
        fastest = score.step_s <= bound_s * (1 + CLOSE)
        return fastest and not (score.tp_outside or score.misfit)


class NodePlacement(NamedTuple):
    """The best placement, its score, and a bound for all others."""

    nodes: tuple[int, ...]  # index of the node in each slot
    candidate: Candidate
    score: PlacementScore
    #: Lower bound of the step over all placements and nesting orders that keep tp and ep inside.
    bound_s: float
    exact: bool  # every placement was costed
    given_score: PlacementScore  # score of the nodes in their given order

    @property
    def gap(self) -> float:
        """The largest share of the step that a better placement could save: 0.03 is 3 %.

        It is 0 if this placement is optimal.
        """
        return 0.0 if self.exact else max(0.0, self.score.step_s / self.bound_s - 1)


class PlacementCosts:
    """Costs placements of one job; equivalent placements are costed once."""

    def __init__(
        self,
        path_cache: PathCache,
        parallel: Parallel,
        traffic: Sequence[Sequence[Traffic]],
        work: Work,
        only: Sequence[Axis] | None,
    ):
        self.path_cache = path_cache
        self.parallel = parallel
        self.traffic = traffic
        self.work = work
        fabric = path_cache.fabric
        self.slots = -(-parallel.world_size // fabric.gpus_per_node)
        self.total = fabric.block.shape[1]
        self.orders = [tuple(only)] if only else list(orders(degrees(parallel)))
        self._by_signature: dict[bytes, tuple[PlacementScore, Candidate]] = {}
        self._inside_first()

    def _inside_first(self) -> None:
        """Drops nesting orders that take tp, then ep, out of a node if others keep it inside.

        This applies only if NVLink domains are single nodes, where no placement can change it.
        """
        fabric = self.path_cache.fabric
        if fabric.gpus[0].max() > fabric.gpus_per_node:
            return
        sizes = degrees(self.parallel)
        groups = [("tp",), axes(self.parallel)]
        for varying in groups:

            def outside(order: tuple[Axis, ...], varying: tuple[Axis, ...] = varying) -> bool:
                """Reports whether groups of the `varying` axes leave their node in this order."""
                last = max((order.index(axis) for axis in varying if sizes[axis] > 1), default=-1)
                reach = math.prod(sizes[inner] for inner in order[: last + 1])
                fills_evenly = (
                    fabric.gpus_per_node % reach == 0 or reach == self.parallel.world_size
                )
                return last >= 0 and (reach > fabric.gpus_per_node or not fills_evenly)

            inside = [order for order in self.orders if not outside(order)]
            self.orders = inside or self.orders

    def cost(self, nodes: tuple[int, ...]) -> ScoredPlacement:
        """Returns the score of this placement in its best nesting order."""
        path_cache = self.path_cache.reordered(nodes)
        pattern = path_cache.fabric.signature()
        if pattern not in self._by_signature:
            best: tuple[PlacementScore, Candidate] | None = None
            for index, order in enumerate(self.orders):
                candidate = candidates(path_cache, self.parallel, self.traffic, self.work, order)[0]
                scored = self._score(candidate, index), candidate
                best = scored if best is None or scored[0] < best[0] else best
            assert best is not None
            self._by_signature[pattern] = best
        score, candidate = self._by_signature[pattern]
        return ScoredPlacement(nodes, candidate, score)

    def _score(self, candidate: Candidate, index: int) -> PlacementScore:
        """Returns the score of a candidate whose nesting order has this index."""
        names = self.path_cache.fabric.names
        busy = 0.0
        for rank in {id(items): items for items in self.traffic}.values():
            total = 0.0
            for item in rank:
                path = candidate.paths[item.key]
                once = collective.seconds(
                    item.operation,
                    item.size,
                    item.members,
                    path,
                    self.work.rate.ring,
                )
                total += item.count * value_of(once)
            busy = max(busy, total)
        levels = [candidate.worst_level(axis) for axis in AXES]
        height = sum(names.index(level) + 1 for level in levels if level in names)
        tp = candidate.outside_nvlink("tp")
        ep = candidate.outside_nvlink("ep")
        return PlacementScore(
            misfit=not candidate.legal,
            tp_outside=tp,
            ep_outside=ep,
            step_s=_round(candidate.step_s),
            busy_s=_round(busy),
            height=height,
            order=index,
        )

    def bound(self) -> float:
        """Returns a lower bound of the step in seconds, for any placement and nesting order."""
        keys = path_keys(self.traffic)
        return min(
            placement_lower_bound(
                self.path_cache.fabric,
                order,
                self.parallel,
                keys,
                self.work,
            )
            for order in self.orders
        )


def place_nodes(
    path_cache: PathCache,
    parallel: Parallel,
    traffic: Sequence[Sequence[Traffic]],
    work: Work,
    only: Sequence[Axis] | None = None,
    exact: bool | None = None,
) -> NodePlacement:
    """Returns the best placement found, which is never worse than the given node order.

    `exact` costs all placements; None does so if there are few nodes. O(nodes log nodes) for many
    nodes. The result depends on the network's shape, not on names or their order, except that the
    given order wins ties.
    """
    costs = PlacementCosts(path_cache, parallel, traffic, work, only)
    bound_s = costs.bound()
    as_given = costs.cost(tuple(range(costs.slots)))
    if exact is None:
        exact = costs.total <= EXACT_NODES
    every_order = _every_order(costs) if exact else None
    node_orders = _promising_orders(costs) if every_order is None else every_order
    tried = itertools.chain([as_given], map(costs.cost, node_orders))
    best = min(tried, key=lambda placement: placement.score)
    swaps_pay = every_order is None and costs.total <= MAX_SWAP_NODES
    if swaps_pay and not best.is_optimal(bound_s):
        best = _improve_by_swaps(costs, best)
    return NodePlacement(
        nodes=best.nodes,
        candidate=best.candidate,
        score=best.score,
        bound_s=min(bound_s, best.score.step_s),
        exact=every_order is not None,
        given_score=as_given.score,
    )


def _every_order(costs: PlacementCosts) -> list[tuple[int, ...]] | None:
    """Returns all node orders, or None if there are more than `EXACT_PLACEMENTS`."""
    distinct = distinct_node_orders(costs.path_cache.fabric, costs.slots)
    node_orders = list(itertools.islice(distinct, EXACT_PLACEMENTS + 1))
    return node_orders if len(node_orders) <= EXACT_PLACEMENTS else None


def _promising_orders(costs: PlacementCosts) -> Iterator[tuple[int, ...]]:
    """Yields the node orders that keep whole groups under one switch, or in one domain."""
    fabric = costs.path_cache.fabric
    yield from packed_node_orders(
        fabric,
        costs.orders,
        degrees(costs.parallel),
        costs.slots,
    )
    if costs.slots != costs.total:
        yield from domain_node_orders(fabric, costs.parallel.tp, costs.slots)


def _improve_by_swaps(costs: PlacementCosts, best: ScoredPlacement) -> ScoredPlacement:
    """Swaps the nodes of two slots, or a used and a free node, as long as that helps.

    At most `MAX_SWAPS` placements are tried.
    """
    tries_left = MAX_SWAPS
    improved = True
    while improved:
        improved = False
        nodes = best.nodes
        spare = [node for node in range(costs.total) if node not in set(nodes)]
        pairs = itertools.combinations(range(len(nodes)), 2)
        tries = [_swapped(nodes, i, j) for i, j in pairs]
        tries += [
            (
                *nodes[:i],
                node,
                *nodes[i + 1 :],
            )
            for i in range(len(nodes))
            for node in spare
        ]
        for swapped in tries:
            if tries_left == 0:
                return best
            tries_left -= 1
            placement = costs.cost(swapped)
            if _is_worth_swapping(placement.score, best.score):
                best = placement
                improved = True
                break
    return best


def _is_worth_swapping(new: PlacementScore, old: PlacementScore) -> bool:
    """Reports whether a swap gains enough."""
    if new[:3] != old[:3]:
        return new[:3] < old[:3]
    return new.step_s < old.step_s * (1 - SWAP_GAIN)


def _swapped(nodes: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    """Returns the nodes with those of slots i and j swapped."""
    swapped = list(nodes)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    return tuple(swapped)


def reorder(cluster: Cluster, nodes: Sequence[int]) -> Cluster:
    """Returns `cluster` with `nodes` first, in this order, and all other nodes last, as spares."""
    chosen = set(nodes)
    order = [*nodes, *(node for node in range(len(cluster.node_names)) if node not in chosen)]
    new_index = np.empty(len(order), dtype=np.int64)
    new_index[order] = np.arange(len(order))

    def moved(blocks: list[list[int]]) -> list[list[int]]:
        """Returns the blocks with the new indexes of their nodes."""
        return sorted(sorted(int(new_index[node]) for node in block) for block in blocks)

    return structs.replace(
        cluster,
        node_names=[cluster.node_names[node] for node in order],
        nvlink_domains=moved(cluster.nvlink_domains),
        levels=[structs.replace(level, switches=moved(level.switches)) for level in cluster.levels],
    )


def _round(seconds: float) -> float:
    """Rounds to nine digits, so that another order of summation is not another cost."""
    return float(f"{seconds:.9g}")


def cluster_to_fill(config: Config, pool: Cluster) -> Cluster:
    """Returns as many nodes of `pool` as the degrees need, for the legality rules.

    The placement may still choose among all nodes. A described cluster is filled, except for the
    nodes that `plan.domains` leaves idle. An imported cluster may be larger; if dp is left out, the
    job takes all of it.
    """
    par = with_defaults(config.parallel)
    if config.cluster.topology_file is None or par.dp is None:
        return pool
    sizes = {axis: getattr(par, axis) for axis in AXES}
    nodes = -(-math.prod(sizes.values()) // pool.gpus_per_node)
    if nodes >= len(pool.node_names):
        return pool
    usable = usable_nodes(
        pool,
        domains_of(pool).inner_group(sizes["tp"], sizes["cp"], sizes["ep"], sizes["pp"]),
    )
    return cut(pool, usable[:nodes] if len(usable) >= nodes else range(nodes))


def make_context(
    config: Config,
    cluster: Cluster,
    profile: Profile | None = None,
    path_cache: PathCache | None = None,
) -> CostContext:
    """Returns the context that all layouts of a configuration share.

    `path_cache` is the cluster's, if there is one already.
    """
    software = software_named(config.cost.software)
    matmul = config.train.matmul
    settings: dict[str, Any] = {"matmul": matmul, "software": software, "profile": profile}
    settings |= {"imbalance": config.cost.expert_imbalance, "state": config.optim.state}
    settings |= {"isolated": config.data.isolate_documents}
    settings |= {"given_buckets": config.parallel.bucket_mib is not None}
    return CostContext(
        cluster,
        resolve(config.model),
        make_train(config),
        path_cache,
        **settings,
    )


def place_job(
    context: CostContext,
    parallel: Parallel,
    only: Sequence[Axis] | None = None,
    move: bool = True,
) -> tuple[CostContext, Certificate]:
    """Places a job on its nodes.

    Returns (context with its nodes in the order of the best placement, spares last; certificate of
    that placement). Without `move` the nodes keep their order, except for those that stay idle, and
    are only certified.
    """
    traffic = step_traffic(context.workload(parallel))
    work = context.work(parallel, context.train)
    if not move:
        if domain_parts(context, parallel) != [context.path_cache]:
            context = _moved(context, solve(context, parallel, only).best.nodes)
        costs = PlacementCosts(context.path_cache, parallel, traffic, work, only)
        bound = costs.bound()
        return context, Certificate(
            bound_s=bound,
            gap=0.0,
            exact=False,
            given_step_s=0.0,
        )
    placement = place_nodes(context.path_cache, parallel, traffic, work, only)
    given_step_s = placement.given_score.step_s
    certificate = Certificate(
        bound_s=placement.bound_s,
        gap=placement.gap,
        exact=placement.exact,
        given_step_s=given_step_s,
    )
    return _moved(context, placement.nodes), certificate


def _moved(context: CostContext, nodes: Sequence[int]) -> CostContext:
    """Returns the context of the same job with its ranks on `nodes`, in this order."""
    if tuple(nodes) == tuple(range(len(nodes))):
        return context.with_chosen_nodes()
    return context.on(reorder(context.cluster, nodes)).with_chosen_nodes()


def certified(certificate: Certificate, step_s: float) -> Certificate:
    """Returns the certificate with its gap to the predicted step, which also limits its bound."""
    bound = min(certificate.bound_s, step_s)
    gap = 0.0 if certificate.exact else step_s / bound - 1
    return structs.replace(
        certificate,
        bound_s=bound,
        gap=gap,
        given_step_s=certificate.given_step_s or step_s,
    )
