"""Best first: every legal layout is either costed exactly or known to cost more than one that was.

Bounds (`bound`) come first, cheapest step first out of a heap; a spot opens into its choices, a choice is costed by the
planner's own `solve`, and what is cheaper than every bound left is the answer. So the result is that of costing all
layouts one by one (a test does), and the same on every run: equal times go to less memory, equal memory to the plainer
layout.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.plan import document as doc
from orchestrator.plan.schedules import SCHEDULES
from orchestrator.plan.supported import Case, broken
from orchestrator.planner.degrees import make_case, make_parallel
from orchestrator.planner.job import make_train
from orchestrator.planner.memory import rank_memory as memory
from orchestrator.planner.memory.deferred_weight_gradients import SPLIT
from orchestrator.planner.model.layers import resolve
from orchestrator.planner.placement.axis_order import Ground, Solution, solve

from .best_paths import BestPaths
from .bound import BranchBound, RowBound, Sharded, SpotBound
from .layer_cost import Params, Piece, params_of
from .pipeline_shapes import Pipes, Shape, pipes_of, shape_of
from .space import METHODS, RECOMPUTE, Choice, Form, Space, Spot

FAMILY, SPOT, BRANCH, ROW, WAY, CHOICE, FOUND = range(7)  # kinds of nodes; of equal bounds the coarser is opened first
LOOPED = ("afab", "1f1b", "interleaved", "zb_h1", "zb_h2")  # stage s on rank s % pp
NEAR = 0.05  # layouts that take this much longer than the fastest are still worth a line when they need less memory


class Found(NamedTuple):
    """One layout, costed exactly."""

    choice: Choice
    solution: Solution
    memory: doc.Memory  # of the fullest pipeline rank
    config: Config  # with every open key filled in

    @property
    def step_s(self) -> float:
        return self.solution.time.step_s


class Effort(NamedTuple):
    legal: int  # layouts of the space; each with every nesting order of its axes
    costed: int  # of them exactly; all others are known to be slower, larger or both


class Answer(NamedTuple):
    """`front`: the fastest layout, then each that is slower by up to `NEAR` and needs less memory than all before."""

    front: list[Found]
    effort: Effort


def preference(choice: Choice) -> tuple:
    """Among equals the plainer layout."""
    names = list(SCHEDULES)
    rank = names.index(choice.schedule) if choice.schedule in names else len(names)
    order = names.index("1f1b") if "1f1b" in names else 0
    spot = choice.spot
    return (
        *(RECOMPUTE.index(choice.recompute) if choice.recompute in RECOMPUTE else 9, choice.zero),
        *(rank != order, choice.vpp, rank, spot.ep, spot.cp, spot.tp, spot.pp, spot.micro_batch_size),
        *(spot.tp > 1 and not spot.sp, METHODS.index(spot.cp_method)),
    )


class Search:
    def __init__(self, config: Config, cluster: doc.Cluster, any_layout: bool = False):
        """`any_layout`: also what the bundled trainer does not run. Raises OrchError (65) where nothing is left."""
        self.ground = Ground(cluster, resolve(config.model), make_train(config))
        self.space = Space(config, self.ground, any_layout)
        self.best = BestPaths(self.ground.roads.fabric, confined=not config.parallel.allow_tp_across_nvlink)
        self.capacity = cluster.gpu.memory_bytes
        self._shapes: dict[tuple[str, int, int], Shape] = {}
        self._pieces: dict[tuple, Piece] = {}
        self._params: dict[tuple[int, int], Params] = {}
        self._forms: dict[tuple[int, int], tuple[int, list[list[Form]]]] = {}
        self._all_pipes: dict[int, Pipes] = {}
        self.legal = self.costed = 0

    def run(self, near: float = NEAR) -> Answer:
        """Raises OrchError where the configuration contradicts itself. An empty front: nothing legal fits."""
        heap = [(base.least_seconds(), FAMILY, (n,), (base, forms)) for n, (base, forms) in enumerate(self.families())]
        heapq.heapify(heap)
        serial, front = len(heap), []
        while heap and not (front and heap[0][0] > front[0].step_s * (1 + near)):
            _, state, _, item = heapq.heappop(heap)
            if state == FOUND:  # costed, and nothing left can be faster
                if not front or item.memory.total < front[-1].memory.total:
                    front.append(item)
                continue
            most = front[-1].memory.total if front else self.capacity
            for seconds, below, key, opened in self._open(state, item, most):
                serial += 1
                heapq.heappush(heap, (seconds, below, key or (serial,), opened))
        return Answer(front, Effort(self.legal, self.costed))

    # -------------------------------------------------------------------------------------- bounds

    def families(self) -> Iterator[tuple[SpotBound, list[list[Form]]]]:
        """What bounds each family of spots that has a choice, and the forms that differ in work; counts choices."""
        for first in self.space.families():
            count = self.space.count(first)
            if count:
                key = first.tp, first.cp
                if key not in self._forms:
                    found = self.space.forms(*key)
                    self._forms[key] = len(found), worth(found)
                many, forms = self._forms[key]
                self.legal += count * many
                yield self.base(first, forms), forms

    def base(self, spot: Spot, forms: list[list[Form]]) -> SpotBound:
        """Of a spot in one of some forms: the first has the least work and the least to keep."""
        sp, way = forms[0][0]
        first = spot._replace(sp=sp, cp_method=way)
        ways = forms[0] if len(forms) == 1 else dict.fromkeys((False, one) for form in forms for _, one in form)
        along = any(form[0][0] != sp for form in forms)
        return SpotBound(first, self._piece(first), self._pipes(first.pp), self.best, [one for _, one in ways], along)

    def _open(self, state: int, item: Any, most: int) -> Iterator[tuple[float, int, tuple, Any]]:
        """What lies below a node and may need no more than `most` bytes: (seconds at least, state, key, item)."""
        if state == FAMILY:
            base, forms = item
            branches = self._branches(base, most)
            if len(forms) == 1:
                yield from ((branch.least_seconds(), BRANCH, (), branch) for branch in branches)
            elif next(branches, None):
                for form in forms:
                    own = self.base(base.spot, [form])
                    own.sharded = base.sharded  # does not depend on the form
                    yield own.least_seconds(), SPOT, (), own
        elif state == SPOT:
            yield from ((branch.least_seconds(), BRANCH, (), branch) for branch in self._branches(item, most))
        elif state == BRANCH:
            for row, names in self.rows(item):
                yield row.least_s, ROW, (), (row, names)
        elif state == ROW:
            row, names = item
            fitting = list(self._fitting(row, names, most))
            if len(row.ways) == 1:
                yield from self._choices(row, fitting, most)
            elif fitting:  # whatever way attention goes: it needs the same memory
                for way in row.ways:
                    own = RowBound(row.branch, row.shape, row.split, row.vpp, [way])
                    yield own.least_s, WAY, (), (own, fitting)
        elif state == WAY:
            yield from self._choices(*item, most)
        else:
            choice, size = item
            found = self.cost(choice) if size <= most else None
            if found is not None:
                yield found.step_s, FOUND, (found.memory.total, preference(choice)), found

    def _branches(self, base: SpotBound, most: int) -> Iterator[BranchBound]:
        branches = base.branches(self.space.recompute, self.space.zeros(base.spot), self.par)
        return (branch for branch in branches if branch.least_bytes() <= most)

    def rows(self, branch: BranchBound) -> Iterator[tuple[RowBound, list[str]]]:
        """Every way that stages lie on ranks, with the schedules that run it."""
        pp = branch.spot.pp
        for (place, split, vpp), names in _alike(self.space.schedules(pp, branch.spot.micro_batches)).items():
            yield RowBound(branch, self._shape(place, names[0], pp, vpp), split, vpp, branch.base.ways), names

    def _fitting(self, row: RowBound, names: list[str], most: int) -> Iterator[tuple[str, Sharded, float]]:
        """(schedule, ZeRO stage, bytes at least) of what may need no more than `most`."""
        for schedule in names:
            kept, shards = row.kept(schedule), self.space.shards(row.branch.spot, schedule)
            for sharded in row.branch.sharded:
                if shards(sharded.par.zero) and (size := row.bytes_of(kept, sharded)) <= most:
                    yield schedule, sharded, size

    def _choices(
        self, row: RowBound, fitting: list[tuple[str, Sharded, float]], most: int
    ) -> Iterator[tuple[float, int, tuple, Any]]:
        spot = row.branch.spot._replace(cp_method=row.ways[0])
        for schedule, sharded, size in fitting:
            if size <= most:
                choice = Choice(spot, row.branch.recompute, sharded.par.zero, schedule, row.vpp)
                yield row.seconds_of(sharded), CHOICE, (), (choice, size)

    def _pipes(self, pp: int) -> Pipes:
        """Of all schedules, also those that some number of micro-batches cannot run."""
        if pp not in self._all_pipes:
            alike = _alike(self.space.schedules(pp))
            shapes = ((self._shape(place, names[0], pp, vpp), split) for (place, split, vpp), names in alike.items())
            self._all_pipes[pp] = pipes_of(shapes)
        return self._all_pipes[pp]

    @cached_property
    def par(self) -> doc.Parallel:
        """Of any layout: bounds read of it what all have in common."""
        spot = next(spot for spot in self.space.spots() if self.space.count(spot))
        config = self.space.fixed(next(iter(self.space.choices(spot))))
        return make_parallel(config, self._case(config))

    def _case(self, config: Config) -> Case:
        return make_case(config, self.ground.cluster, self.ground.model)

    def _piece(self, spot: Spot) -> Piece:
        key = spot.tp, spot.cp, spot.ep, spot.sp, spot.micro_batch_size, spot.cp_method == "ring"
        found = self._pieces.get(key)
        if found is None:
            cut = spot.tp, spot.ep
            if cut not in self._params:
                self._params[cut] = params_of(self.ground.model, *cut)
            names = ("tp", "cp", "ep", "sp", "micro_batch_size", "cp_method")
            par = structs.replace(self.par, **{name: getattr(spot, name) for name in names})
            found = self._pieces[key] = Piece(par, self.ground, self.best, self._params[cut])
        return found

    def _shape(self, place: str, schedule: str, pp: int, vpp: int) -> Shape:
        key = place, pp, vpp
        if key not in self._shapes:
            layers = self.space.stage_layers(pp * vpp)
            piped = structs.replace(self.par, schedule=schedule, pp=pp, vpp=vpp, stage_layers=layers)
            self._shapes[key] = shape_of(place, self.ground.model, piped)
        return self._shapes[key]

    # -------------------------------------------------------------------------------------- costs

    def cost(self, choice: Choice) -> Found | None:
        """A layout exactly as `build_plan` costs it; None when it breaks a rule or does not fit."""
        self.costed += 1
        config = self.space.fixed(choice)
        case = self._case(config)
        if broken(case, self.space.rules) is not None:
            return None
        train = structs.replace(self.ground.train, recompute=choice.recompute)
        parallel = make_parallel(config, case)
        accounts = memory.accounts(self.ground.cluster, self.ground.model, parallel, train)
        worst = max(accounts, key=lambda account: account.total)
        if worst.total > worst.capacity:
            return None
        solution = solve(self.ground, parallel, config.parallel.order, train)
        if solution.best.outside_nvlink("tp") and not case.allow_tp_across_nvlink:
            return None  # an order that was given puts it there
        return Found(choice, solution, worst, config)


def worth(forms: list[Form]) -> list[list[Form]]:
    """Those that may be best, by what they compute: a contiguous ring (its last rank has most work) apart.

    Where zig-zag can run, a contiguous ring never pays: it sends the same and takes longer.
    """
    found: dict[tuple[bool, bool], list[Form]] = {}
    for sp, way in forms:
        found.setdefault((way == "ring", not sp), []).append((sp, way))
    zigzag = any(way == "zigzag" for _, way in forms)
    return [form for (ring, _), form in sorted(found.items()) if not (ring and zigzag)]


def _alike(schedules: dict[str, list[int]]) -> dict[tuple[str, bool, int], list[str]]:
    """(how stages are placed, whether backward is in two pieces, virtual stages) -> schedules."""
    found: dict[tuple[str, bool, int], list[str]] = {}
    for schedule, stages in schedules.items():
        for vpp in stages:
            place = "loop" if schedule in LOOPED else schedule
            found.setdefault((place, schedule in SPLIT, vpp), []).append(schedule)
    return found
