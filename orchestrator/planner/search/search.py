"""Best-first branch and bound over all legal layouts, with the result of costing each one exactly.

Nodes of the search tree wait in a heap, ordered by a lower bound of their step time (`bound`). A
column opens into families whose layers cost the same, a family into its meshes, a mesh into
recomputation modes, then pipeline shapes, then layouts, and `solve` costs a layout. A costed layout
that is cheaper than every bound left in the heap is the answer. Ties are the same on every run:
equal times go to less memory, equal memory to the layout that `preference` puts first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.profile import Profile
from orchestrator.cost.workload import Workload
from orchestrator.plan import document as doc
from orchestrator.plan.supported import Case, broken
from orchestrator.planner.degrees import make_case, make_parallel
from orchestrator.planner.placement.best_order import Nestings, Solution
from orchestrator.planner.placement.node_placement import make_context

from .best_paths import BestPaths
from .bound import Layers, MeshBound, RecomputeBound, ZeroStage, least_of_column
from .costed_layout import CostedLayout
from .layer_costs import LayerCosts
from .layout import Fold, Layout, Mesh, Variant
from .pipeline_bound import PipelineBound
from .pipelines import PipelinesOfMeshes
from .space import Space
from .ties import EQUAL, MOST_EQUAL, preference, preferred_first

#: Kinds of nodes of the search tree; of equal bounds, the coarser node is opened first.
COLUMN, FAMILY, MESH, RECOMPUTE, PIPELINE, SENDING, CP_METHOD, LAYOUT, SCHEDULED, PLACED, COSTED = (
    range(11)
)
WORTH = 1e-6  # the share of the step that a less simple exchange must save
# an option of a family: the folding of experts, variants of equal work
Option = tuple[Fold, list[Variant]]
# (lower bound in seconds, kind, tie-breaker, item)
Node = tuple[float, int, tuple[object, ...], Any]
#: Layouts that are slower than the fastest by up to this share are reported if they need less
#: memory.
NEAR = 0.05


class Column(NamedTuple):
    """Families whose layers cost the same.

    They differ in stages and replicas, and so in micro-batches.
    """

    meshes: list[Mesh]  # the first mesh of each family
    options: list[Option]
    layers: Layers


class PlacedLayout(NamedTuple):
    """A legal layout in all nesting orders, before one of them is chosen."""

    layout: Layout
    config: Config
    parallel: doc.Parallel
    train: doc.Train
    nestings: list[Nestings]  # one per open exchange of expert tokens
    fills: bool

    @property
    def least_s(self) -> float:
        """Lower bound of the step in seconds."""
        return min(orders.least_s for orders in self.nestings)

    def solve(self) -> Solution:
        """Returns the best nesting order with the best exchange of expert tokens."""
        best, *alternatives = (orders.solve() for orders in self.nestings)
        for alternative in alternatives:
            best = alternative if alternative.time.step_s < best.time.step_s * (1 - WORTH) else best
        return best


class SearchCounts(NamedTuple):
    """The numbers of layouts and nodes that a search met."""

    legal: int  # legal layouts; each includes every nesting order of its axes
    costed: int  # legal layouts that were costed exactly; bounds excluded the others
    bounded: int  # nodes of the search tree that were bounded


class SearchResult(NamedTuple):
    """The fastest layouts of a search.

    `front` holds the fastest layout, then each slower one (by up to `NEAR`) that needs less memory
    than all before it.
    """

    front: list[CostedLayout]
    counts: SearchCounts
    # Layouts as fast as the fastest, as far as predictions can tell: the one to take, then by time.
    equal: list[CostedLayout]


class Search:
    """A search over the legal layouts of one configuration on one cluster."""

    def __init__(
        self,
        config: Config,
        cluster: doc.Cluster,
        any_layout: bool = False,
        profile: Profile | None = None,
    ):
        """`any_layout` includes layouts that the bundled trainer does not run.

        Raises OrchError (65) if nothing is left to search.
        """
        self.context = make_context(config, cluster, profile)
        self.space = Space(config, self.context, any_layout)
        confined = not config.parallel.allow_tp_across_nvlink
        self.best = BestPaths(self.context.path_cache.fabric, self.context.rate, confined)
        self.recipe = recipe_of(config.cost.software, config.optim)
        self.capacity = self.recipe.capacity(cluster)
        #: The open exchanges of expert tokens; inside one NVLink domain there is no choice.
        self.all_to_alls: tuple[doc.AllToAll, ...] = ("direct",)
        if config.parallel.expert_all_to_all:
            self.all_to_alls = (config.parallel.expert_all_to_all,)
        elif len(cluster.nvlink_domains) > 1:
            self.all_to_alls = ("direct", "hierarchical")
        self._sharded: dict[tuple[object, ...], list[ZeroStage]] = {}
        self.legal = self.costed = 0

    def run(self, near: float = NEAR) -> SearchResult:
        """Returns the Pareto front of time and memory, which is empty if nothing legal fits.

        Raises OrchError (65) if the configuration contradicts itself.
        """
        columns = enumerate(self.columns())
        heap: list[Node] = [
            (least_of_column(column.meshes, column.layers), COLUMN, (n,), column)
            for n, column in columns
        ]
        heapq.heapify(heap)
        serial = len(heap)
        front = list[CostedLayout]()
        equal = list[CostedLayout]()

        def level(seconds: float) -> bool:
            """Reports whether a layout with this step equals the fastest and is still compared."""
            return not equal or (
                len(equal) < MOST_EQUAL and seconds <= equal[0].step_s * (1 + EQUAL)
            )

        while heap and (
            not front or level(heap[0][0]) or heap[0][0] <= front[0].step_s * (1 + near)
        ):
            least, state, _, item = heapq.heappop(heap)
            if state == COSTED:  # Nothing that is left can be faster.
                if level(item.step_s):
                    equal.append(item)
                if not front or (
                    item.memory.total < front[-1].memory.total
                    and item.step_s <= front[0].step_s * (1 + near)
                ):
                    front.append(item)
                continue
            byte_limit = self.capacity if level(least) else front[-1].memory.total
            for seconds, below, key, opened in self._open(state, item, byte_limit):
                serial += 1
                heapq.heappush(heap, (seconds, below, key or (serial,), opened))
        chosen = preferred_first(equal, self.context.level_names[-1]) if equal else []
        return SearchResult(front, SearchCounts(self.legal, self.costed, serial), chosen)

    # -------------------------------------------------------------------------------------- bounds

    def columns(self) -> Iterator[Column]:
        """Yields every column of families with a legal layout, and counts the legal layouts."""
        families: dict[tuple[int, ...], list[Mesh]] = {}
        for first in self.space.families():
            folded = self.space.folded(first.tp, first.cp, first.ep)
            layouts = sum(
                self.space.count(first._replace(etp=etp, fold_cp=fold_cp)) * len(variants)
                for (etp, fold_cp), variants in folded
            )
            if layouts:
                self.legal += layouts
                families.setdefault((*first[:3], first.micro_batch_size), []).append(first)
        for (tp, cp, ep, _), meshes in families.items():
            folded = self.space.folded(tp, cp, ep)
            options = [
                (fold, variant) for fold, variants in folded for variant in worthwhile(variants)
            ]
            yield Column(meshes, options, self._layers(meshes[0], options))

    def base(self, mesh: Mesh, options: list[Option]) -> MeshBound:
        """Returns the bound of a mesh in any of `options`.

        The first option has the least work and keeps the fewest bytes, apart from the folding of
        experts.
        """
        return self._base(mesh, self._layers(mesh, options))

    def _base(self, mesh: Mesh, layers: Layers) -> MeshBound:
        """Returns the bound of a mesh with these layers."""
        (etp, fold_cp), (sp, method) = layers.fold, layers.variant
        first = mesh._replace(sp=sp, cp_method=method, etp=etp, fold_cp=fold_cp)
        return MeshBound(first, layers, self.shapes.summary(first), self.best)

    def _layers(self, mesh: Mesh, options: list[Option]) -> Layers:
        """Returns the costs that a layer of the mesh may have in any of `options`."""
        fold, (variant, *_) = options[0]
        (sp, method), cp_methods = (
            variant,
            tuple(dict.fromkeys(mesh_of_fold for _, equal in options for _, mesh_of_fold in equal)),
        )
        sp_open = any(equal[0][0] != sp for _, equal in options)
        first = mesh._replace(sp=sp, cp_method=method)
        folds = [
            first._replace(etp=fold_of_mesh[0], fold_cp=fold_of_mesh[1])
            for fold_of_mesh in dict.fromkeys(fold for fold, _ in options)
        ]
        return Layers(
            fold,
            variant,
            cp_methods,
            sp_open,
            [self.layer_costs.of_mesh(mesh_of_fold, self.par) for mesh_of_fold in folds],
        )

    def _open(self, state: int, item: Any, byte_limit: int) -> Iterator[Node]:
        """Yields the children of a node that may need no more than `byte_limit` bytes."""
        if state == COLUMN:
            for mesh in item.meshes:
                base = self._base(mesh, item.layers)
                yield base.least_seconds(), FAMILY, (), (base, item.options)
        elif state == FAMILY:
            base, options = item
            if len(options) == 1:
                yield from self._branches(base, byte_limit)
            for option in options if len(options) > 1 else ():
                mesh_bound = self.base(base.mesh, [option])
                yield mesh_bound.least_seconds(), MESH, (), mesh_bound
        elif state == MESH:
            yield from self._branches(item, byte_limit)
        elif state == RECOMPUTE:
            for pipeline, names in self.pipelines(item):
                yield pipeline.least_s, PIPELINE, (), (pipeline, names)
        elif state == PIPELINE:
            pipeline = item[0]
            least = min(map(pipeline.seconds_of, pipeline.branch.sharded))
            yield least, SENDING, (), item
        elif state == SENDING:
            pipeline, names = item
            fitting = list(self._fitting(pipeline, names, byte_limit))
            if len(pipeline.cp_methods) == 1:
                yield from self._layouts(pipeline, fitting, byte_limit)
            elif fitting:  # All methods of context parallelism need the same memory.
                for method in pipeline.cp_methods:
                    bound = PipelineBound(
                        pipeline.branch, pipeline.shape, pipeline.split, pipeline.vpp, [method]
                    )
                    least = min(bound.seconds_of(sharded) for _, sharded, _ in fitting)
                    yield least, CP_METHOD, (), (bound, fitting)
        elif state == CP_METHOD:
            pipeline, fitting = item
            yield from self._layouts(pipeline, fitting, byte_limit)
        elif state == LAYOUT:
            layout, size, pipeline, sharded = item
            least = pipeline.seconds_with(layout.schedule, sharded)
            if size <= byte_limit and pipeline.shape.unequal:
                size = pipeline.bytes_of(pipeline.kept(layout.schedule, exact=True), sharded)
            if size <= byte_limit:
                yield least, SCHEDULED, (), layout
        elif state == SCHEDULED:
            placed = self._place(item)
            if placed is not None:
                yield placed.least_s, PLACED, (), placed
        else:
            costed = self._cost(item, byte_limit)
            if costed is not None:
                yield (
                    costed.step_s,
                    COSTED,
                    (costed.memory.total, preference(costed.layout)),
                    costed,
                )

    def _branches(self, base: MeshBound, byte_limit: int) -> Iterator[Node]:
        """Yields a node per recomputation mode that may fit."""
        shared_key = (*base.mesh[:7], base.mesh.fold)  # This key is the same for all variants.
        base.sharded = self._sharded.setdefault(shared_key, base.sharded)
        for branch in base.branches(self.space.recompute, self.space.zeros(base.mesh)):
            if branch.least_bytes() <= byte_limit:
                yield branch.least_s, RECOMPUTE, (), branch

    def pipelines(self, branch: RecomputeBound) -> Iterator[tuple[PipelineBound, list[str]]]:
        """Yields every assignment of stages to ranks, with the schedules that use it."""
        mesh = branch.mesh
        cp_methods = branch.base.cp_methods
        for (placement, split, vpp), names in self.shapes.alike(mesh).items():
            shape = self.shapes.shape(placement, names[0], mesh.pp, vpp)
            yield PipelineBound(branch, shape, split, vpp, cp_methods), names

    def _fitting(
        self, pipeline: PipelineBound, names: list[str], byte_limit: int
    ) -> Iterator[tuple[str, ZeroStage, float]]:
        """Yields (schedule, ZeRO stage, lower bound in bytes) of pairs that may fit the limit."""
        for schedule in names:
            activation_bytes = pipeline.kept(schedule)
            shards = self.space.shards(pipeline.branch.mesh, schedule)
            for sharded in pipeline.branch.sharded:
                if (
                    shards(sharded.par.zero)
                    and (size := pipeline.bytes_of(activation_bytes, sharded)) <= byte_limit
                ):
                    yield schedule, sharded, size

    def _layouts(
        self, pipeline: PipelineBound, fitting: list[tuple[str, ZeroStage, float]], byte_limit: int
    ) -> Iterator[Node]:
        """Yields a node per layout that may fit."""
        mesh = pipeline.branch.mesh._replace(cp_method=pipeline.cp_methods[0])
        for schedule, sharded, size in fitting:
            if size <= byte_limit:
                layout = Layout(
                    mesh, pipeline.branch.recompute, sharded.par.zero, schedule, pipeline.vpp
                )
                yield pipeline.seconds_of(sharded), LAYOUT, (), (layout, size, pipeline, sharded)

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """The layer costs of this search."""
        return LayerCosts(self.context, self.best, self.recipe, self.all_to_alls)

    @cached_property
    def shapes(self) -> PipelinesOfMeshes:
        """The pipeline shapes of this search."""
        return PipelinesOfMeshes(self.space, self.par)

    @cached_property
    def par(self) -> doc.Parallel:
        """The `parallel` of some layout; bounds read only fields that all layouts share."""
        mesh = next(mesh for mesh in self.space.meshes() if self.space.count(mesh))
        config = self.space.fixed(next(iter(self.space.layouts(mesh))))
        return make_parallel(config, self._case(config))

    def _case(self, config: Config) -> Case:
        """Returns the legality case of a configuration."""
        return make_case(config, self.context.cluster, self.context.model)

    # -------------------------------------------------------------------------------------- costs

    def cost(self, layout: Layout) -> CostedLayout | None:
        """Costs a layout exactly as `build_plan` does.

        Returns None if it breaks a rule or does not fit the memory.
        """
        placed = self._place(layout)
        return None if placed is None else self._cost(placed)

    def _place(self, layout: Layout) -> PlacedLayout | None:
        """Returns the layout in all nesting orders, or None if it breaks a rule."""
        config = self.space.fixed(layout)
        case = self._case(config)
        if broken(case, self.space.rules) is not None:
            return None
        train = structs.replace(self.context.train, recompute=layout.recompute)
        parallel = self.context.balanced(make_parallel(config, case))
        nestings = self._nestings(parallel, config, train)
        if not nestings:
            return None
        fills = self.space.filled(case.tp, case.cp, case.ep, case.pp) == case.ranks
        return PlacedLayout(layout, config, parallel, train, nestings, fills)

    def _nestings(self, parallel: doc.Parallel, config: Config, train: doc.Train) -> list[Nestings]:
        """Returns the nesting orders, once per open exchange of expert tokens.

        The list is empty if no order allows the exchange that is given.
        """
        legal_nestings: list[Nestings] = []
        for all_to_all in self.all_to_alls:
            if all_to_all == "hierarchical":
                if legal_nestings and not legal_nestings[0].outside_nvlink("ep"):
                    continue  # the exchange crosses no domain
                parallel = structs.replace(parallel, expert_all_to_all=all_to_all)
            nestings = Nestings(self.context, parallel, config.parallel.order, train)
            legal_nestings += [nestings] if nestings.legal else []
        return legal_nestings

    def _cost(self, placed: PlacedLayout, byte_limit: float = float("inf")) -> CostedLayout | None:
        """Costs a placed layout; returns None if it needs too much memory or `byte_limit`."""
        self.costed += 1
        workload = Workload(self.context.model, placed.parallel, placed.train)
        accounts = memory.memory_by_pp_rank(
            workload, self.context.cluster, self.recipe, self.context.matmul
        )
        worst = max(accounts, key=lambda account: account.total)
        if worst.total > min(worst.capacity, byte_limit):
            return None
        solution = placed.solve()
        config = placed.config
        if solution.best.outside_nvlink("tp") and not config.parallel.allow_tp_across_nvlink:
            return None  # `parallel.order` puts tensor-parallel groups across nodes
        if solution.parallel.expert_all_to_all == "hierarchical":
            with_all_to_all = structs.replace(config.parallel, expert_all_to_all="hierarchical")
            config = structs.replace(config, parallel=with_all_to_all)
        return CostedLayout(placed.layout, solution, worst, config, placed.fills)


def worthwhile(variants: list[Variant]) -> list[list[Variant]]:
    """Groups the variants that may be best by equal work.

    A contiguous ring gives its last rank more work than the others. It is left out if zig-zag can
    run, because it sends the same bytes and takes longer.
    """
    variants_worth: dict[tuple[bool, bool], list[Variant]] = {}
    for sp, method in variants:
        variants_worth.setdefault((method == "ring", not sp), []).append((sp, method))
    zigzag = any(method == "zigzag" for _, method in variants)
    return [
        variant for (ring, _), variant in sorted(variants_worth.items()) if not (ring and zigzag)
    ]
