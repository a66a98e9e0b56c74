"""Which node each run of ranks sits on, when it matters: ragged, fragmented or too many nodes. With a certificate.

Ranks fill node places 0, 1, 2, ... (`layout`); a seating says which node stands at each place. Objective, lexicographic
(planning.md E2): tensor-parallel groups inside an NVLink domain, expert-parallel groups too, then the predicted step
(which holds the load of shared uplinks), then all communication time, hidden or not, then the levels that axes cross.

Few nodes are seated exactly: every seating up to symmetry is costed. Many are seated by packing whole groups under
switches, for every nesting order, then by swaps. The order that the scheduler gave is always one of the candidates, so
the answer is never worse; `bound` holds for every seating, so the gap to it says how much better one could be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.config.validate import with_defaults
from orchestrator.plan.document import Axis, Certificate, Cluster, Parallel
from orchestrator.plan.ranks import AXES, degrees
from orchestrator.planner.cost import collective
from orchestrator.planner.cost.collective import PATTERN
from orchestrator.planner.cost.step_time import Work, step_work
from orchestrator.planner.cost.traffic import Traffic, step_traffic

from .axis_order import Candidate, Ground, Roads, candidates, orders
from .group_packing import packings, symmetric
from .lower_bound import step_bound

EXACT_NODES = 8
EXACT_SEATINGS = 6000  # up to symmetry
SWAPS_NODES = 64
SWAPS = 400  # seatings that swapping may cost
SWAP_GAIN = 1e-4  # what a swap must save of the step
CLOSE = 1e-9  # seatings whose step differs by less are equal


class Score(NamedTuple):
    """Smaller is better."""

    tp_outside: bool
    ep_outside: bool
    step_s: float
    busy_s: float
    height: int
    order: int  # nearest to the default nesting


class Seating(NamedTuple):
    nodes: tuple[int, ...]  # index of the node at each place that the job uses
    candidate: Candidate
    score: Score
    bound_s: float  # no seating has a shorter step, in any nesting order that keeps tp and ep inside where one can
    exact: bool  # every seating was costed
    given: Score  # of the nodes as they came

    @property
    def gap(self) -> float:
        """0.03: at most 3 % could still be gained. 0 when nothing can."""
        return 0.0 if self.exact else max(0.0, self.score.step_s / self.bound_s - 1)


class Table:
    """The dining table of one job: costs seatings."""

    def __init__(
        self, roads: Roads, parallel: Parallel, traffic: Sequence[Traffic], work: Work, only: Sequence[Axis] | None
    ):
        self.roads, self.parallel, self.traffic, self.work = roads, parallel, traffic, work
        fabric = roads.fabric
        self.places = -(-parallel.world_size // fabric.gpus_per_node)
        self.total = fabric.block.shape[1]
        self.orders = [tuple(only)] if only else list(orders(degrees(parallel)))
        self._by_pattern: dict[bytes, tuple[Score, Candidate]] = {}
        self._inside_first()

    def _inside_first(self) -> None:
        """Leave out orders that take tp (then ep) out of a single node when others keep it in: seats cannot help them.

        Only where NVLink domains are single nodes, so that the answer does not depend on who sits where.
        """
        fabric = self.roads.fabric
        if fabric.gpus[0].max() > fabric.gpus_per_node:
            return
        sizes = degrees(self.parallel)
        for axis in ("tp", "ep"):

            def outside(order: tuple[Axis, ...], axis: str = axis) -> bool:
                reach = 1
                for inner in order[: order.index(axis) + 1]:
                    reach *= sizes[inner]
                whole = fabric.gpus_per_node % reach == 0 or reach == self.parallel.world_size
                return sizes[axis] > 1 and (reach > fabric.gpus_per_node or not whole)

            inside = [order for order in self.orders if not outside(order)]
            self.orders = inside or self.orders

    def cost(self, nodes: Sequence[int]) -> tuple[Score, Candidate]:
        """The best nesting order for this seating."""
        roads = self.roads.reseated(nodes)
        pattern = roads.fabric.pattern()
        if pattern not in self._by_pattern:
            best: tuple[Score, Candidate] | None = None
            for index, order in enumerate(self.orders):
                found = candidates(roads, self.parallel, self.traffic, self.work, order)[0]
                scored = self._score(found, index), found
                best = scored if best is None or scored[0] < best[0] else best
            assert best is not None
            self._by_pattern[pattern] = best
        return self._by_pattern[pattern]

    def _score(self, found: Candidate, index: int) -> Score:
        names = self.roads.fabric.names
        busy = 0.0
        for item in self.traffic:
            path = found.paths[item.varying, PATTERN[item.operation]]
            busy += item.count * collective.seconds(item.operation, item.size, item.members, path)
        levels = [found.worst_level(axis) for axis in AXES]
        height = sum(names.index(level) + 1 for level in levels if level in names)
        outside = [found.outside_nvlink(axis) for axis in ("tp", "ep")]
        return Score(*outside, _round(found.step_s), _round(busy), height, index)

    def bound(self) -> float:
        """Seconds that a step takes at least, on any nodes in any of the orders."""
        return min(
            step_bound(self.roads.fabric, order, self.parallel, self.traffic, self.work, self.places)
            for order in self.orders
        )


def seat(
    roads: Roads,
    parallel: Parallel,
    traffic: Sequence[Traffic],
    work: Work,
    only: Sequence[Axis] | None = None,
    exact: bool | None = None,
) -> Seating:
    """The best seating found, never worse than the nodes as they came. `exact`: None = where there are few nodes.

    O(nodes log nodes) for many nodes. The answer depends on the network's shape, not on names or their order, except
    that nodes as they came win ties.
    """
    table = Table(roads, parallel, traffic, work, only)
    given = tuple(range(table.places))
    bound = table.bound()
    best = (*table.cost(given), given)
    given_score = best[0]

    def done() -> bool:
        return best[0].step_s <= bound * (1 + CLOSE) and not best[0].tp_outside

    few = table.total <= EXACT_NODES if exact is None else exact
    if few and (seatings := _up_to(EXACT_SEATINGS, symmetric(roads.fabric, table.places))) is not None:
        for nodes in seatings:
            best = min(best, (*table.cost(nodes), nodes), key=lambda found: found[0])
        return Seating(best[2], best[1], best[0], min(bound, best[0].step_s), True, given_score)
    sizes = degrees(parallel)
    for nodes in packings(roads.fabric, table.orders, sizes, table.places):
        best = min(best, (*table.cost(nodes), nodes), key=lambda found: found[0])
    if not done() and table.total <= SWAPS_NODES:
        best = _swap(table, best)
    return Seating(best[2], best[1], best[0], min(bound, best[0].step_s), False, given_score)


def _up_to(limit: int, found: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
    result = []
    for nodes in found:
        if len(result) == limit:
            return None
        result.append(nodes)
    return result


def _swap(table: Table, best: tuple[Score, Candidate, tuple[int, ...]]) -> tuple[Score, Candidate, tuple[int, ...]]:
    """Exchange two places, or a place and a free node, while that helps; a fixed number of tries."""
    left = SWAPS
    improved = True
    while improved:
        improved = False
        nodes = best[2]
        spare = [node for node in range(table.total) if node not in set(nodes)]
        pairs = [(i, j) for i in range(len(nodes)) for j in range(i + 1, len(nodes))]
        tries = [_exchanged(nodes, i, j) for i, j in pairs]
        tries += [(*nodes[:i], node, *nodes[i + 1 :]) for i in range(len(nodes)) for node in spare]
        for other in tries:
            if left == 0:
                return best
            left -= 1
            scored = table.cost(other)
            if _worth(scored[0], best[0]):
                best, improved = (*scored, other), True
                break
    return best


def _worth(new: Score, old: Score) -> bool:
    """Whether a swap is worth its untidiness."""
    return new[:2] < old[:2] or (new[:2] == old[:2] and new.step_s < old.step_s * (1 - SWAP_GAIN))


def _exchanged(nodes: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    result = list(nodes)
    result[i], result[j] = result[j], result[i]
    return tuple(result)


def reorder(cluster: Cluster, nodes: Sequence[int]) -> Cluster:
    """The same machines with `nodes` first, in this order; the others, in their old order, are the spares behind."""
    chosen = set(nodes)
    order = [*nodes, *(node for node in range(len(cluster.node_names)) if node not in chosen)]
    at = np.empty(len(order), dtype=np.int64)
    at[order] = np.arange(len(order))

    def moved(blocks: list[list[int]]) -> list[list[int]]:
        return sorted(sorted(int(at[node]) for node in block) for block in blocks)

    return structs.replace(
        cluster,
        node_names=[cluster.node_names[node] for node in order],
        nvlink_domains=moved(cluster.nvlink_domains),
        levels=[structs.replace(level, switches=moved(level.switches)) for level in cluster.levels],
    )


def _round(seconds: float) -> float:
    """To nine digits: two ways to add the same numbers must not look like two costs."""
    return float(f"{seconds:.9g}")


def wanted(config: Config, pool: Cluster) -> Cluster:
    """As many of the pool's nodes as the degrees ask for, to judge them by; which ones is decided later.

    A described cluster is the job's own and must be filled. An imported one may be larger: dp left out takes all of it.
    """
    par = with_defaults(config.parallel)
    if config.cluster.topology_file is None or par.dp is None:
        return pool
    places = -(-par.tp * par.cp * par.ep * par.pp * par.dp // pool.gpus_per_node)
    if places >= len(pool.node_names):
        return pool
    keep = set(range(places))

    def kept(blocks: list[list[int]]) -> list[list[int]]:
        return [inside for block in blocks if (inside := [node for node in block if node in keep])]

    return structs.replace(
        pool,
        node_names=pool.node_names[:places],
        nvlink_domains=kept(pool.nvlink_domains),
        levels=[structs.replace(level, switches=kept(level.switches)) for level in pool.levels],
    )


def seated(
    ground: Ground, parallel: Parallel, only: Sequence[Axis] | None = None, move: bool = True
) -> tuple[Ground, Certificate]:
    """The ground with its nodes in the order of the best seating (spares last), and how good that is.

    Without `move` the nodes stay as they are, and are only certified.
    """
    traffic = step_traffic(ground.model, parallel, ground.train)
    work = step_work(ground.model, parallel, ground.train, ground.rate)
    if not move:
        table = Table(ground.roads, parallel, traffic, work, only)
        bound = table.bound()
        return ground, Certificate(bound_s=bound, gap=0.0, exact=False, given_step_s=0.0)
    found = seat(ground.roads, parallel, traffic, work, only)
    if found.nodes != tuple(range(len(found.nodes))):
        ground = Ground(reorder(ground.cluster, found.nodes), ground.model, ground.train)
    given = found.given.step_s
    return ground, Certificate(bound_s=found.bound_s, gap=found.gap, exact=found.exact, given_step_s=given)


def certified(certificate: Certificate, step_s: float) -> Certificate:
    """With the gap of the step that the plan predicts; the bound can be no higher than that."""
    bound = min(certificate.bound_s, step_s)
    gap = 0.0 if certificate.exact else step_s / bound - 1
    return structs.replace(certificate, bound_s=bound, gap=gap, given_step_s=certificate.given_step_s or step_s)
