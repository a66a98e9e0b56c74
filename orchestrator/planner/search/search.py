"""Best-first branch and bound over all legal layouts, with the result of costing each one exactly.

Nodes of the search tree wait in a heap, ordered by a lower bound of their step time (`bound`). A
column opens into families whose layers cost the same, a family into its meshes, a mesh into
recomputation modes, then pipeline shapes, then layouts, which `ExactCosts` costs. A costed layout
that is cheaper than every bound left in the heap is the answer. Ties are the same on every run:
equal times go to less memory, equal memory to the layout that `preference` puts first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from orchestrator.config.schema import Config
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.profile import Profile
from orchestrator.plan import document as doc
from orchestrator.planner.degrees import make_parallel
from orchestrator.planner.placement.node_placement import make_context

from .best_paths import BestPaths
from .bound import Layers, MeshBound, RecomputeBound, ZeroStage, least_of_column
from .costed_layout import CostedLayout
from .exact_costs import ExactCosts, PlacedLayout
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
        self.exact_costs = ExactCosts(self.space, self.recipe)
        self.legal = 0  # layouts
        self._sharded: dict[tuple[object, ...], list[ZeroStage]] = {}

    def run(self, near: float = NEAR) -> SearchResult:
        """Returns the Pareto front of time and memory, which is empty if nothing legal fits.

        Raises OrchError (65) if the configuration contradicts itself.
        """
        heap: list[Node] = [
            (
                least_of_column(column.meshes, column.layers),
                COLUMN,
                (number,),
                column,
            )
            for number, column in enumerate(self.columns())
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
            least, kind, _, item = heapq.heappop(heap)
            if kind == COSTED:  # Nothing that is left can be faster.
                if level(item.step_s):
                    equal.append(item)
                if not front or (
                    item.memory.total < front[-1].memory.total
                    and item.step_s <= front[0].step_s * (1 + near)
                ):
                    front.append(item)
                continue
            byte_limit = self.capacity if level(least) else front[-1].memory.total
            for seconds, child_kind, key, child in self._open(kind, item, byte_limit):
                serial += 1
                heapq.heappush(heap, (seconds, child_kind, key or (serial,), child))
        chosen = preferred_first(equal, self.context.level_names[-1]) if equal else []
        return SearchResult(
            front,
            SearchCounts(self.legal, self.exact_costs.costed, serial),
            chosen,
        )

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
        etp, fold_cp = layers.fold
        sp, method = layers.variant
        first = mesh._replace(
            sp=sp,
            cp_method=method,
            etp=etp,
            fold_cp=fold_cp,
        )
        return MeshBound(first, layers, self.shapes.summary(first), self.best)

    def _layers(self, mesh: Mesh, options: list[Option]) -> Layers:
        """Returns the costs that a layer of the mesh may have in any of `options`."""
        fold, (variant, *_) = options[0]
        sp, method = variant
        variants = [equal_variant for _, equal in options for equal_variant in equal]
        first = mesh._replace(sp=sp, cp_method=method)
        folded_meshes = [
            first._replace(etp=etp, fold_cp=fold_cp)
            for etp, fold_cp in dict.fromkeys(fold_of_option for fold_of_option, _ in options)
        ]
        return Layers(
            fold=fold,
            variant=variant,
            cp_methods=tuple(dict.fromkeys(cp_method for _, cp_method in variants)),
            sp_open=any(equal[0][0] != sp for _, equal in options),
            costs=[self.layer_costs.of_mesh(folded, self.par) for folded in folded_meshes],
        )

    # --------------------------------------------------------------------------------------- nodes

    def _open(self, kind: int, item: Any, byte_limit: int) -> Iterator[Node]:
        """Returns the children of a node that may need no more than `byte_limit` bytes."""
        if kind == COLUMN:
            return self._families(item)
        if kind == FAMILY:
            base, options = item
            return self._meshes(base, options, byte_limit)
        if kind == MESH:
            return self._branches(item, byte_limit)
        if kind == RECOMPUTE:
            return self._pipelines(item)
        if kind == PIPELINE:
            return self._with_transfers(item)
        if kind == SENDING:
            pipeline, names = item
            return self._cp_methods(pipeline, names, byte_limit)
        if kind == CP_METHOD:
            pipeline, fitting = item
            return self._layouts(pipeline, fitting, byte_limit)
        if kind == LAYOUT:
            layout, size, pipeline, sharded = item
            return self._scheduled(layout, size, pipeline, sharded, byte_limit)
        if kind == SCHEDULED:
            return self._placed(item)
        return self._costed(item, byte_limit)

    def _families(self, column: Column) -> Iterator[Node]:
        """Yields a node per family of a column."""
        for mesh in column.meshes:
            base = self._base(mesh, column.layers)
            yield base.least_seconds(), FAMILY, (), (base, column.options)

    def _meshes(self, base: MeshBound, options: list[Option], byte_limit: int) -> Iterator[Node]:
        """Yields a node per mesh of a family, or those below it if there is a single mesh."""
        if len(options) == 1:
            yield from self._branches(base, byte_limit)
            return
        for option in options:
            mesh_bound = self.base(base.mesh, [option])
            yield mesh_bound.least_seconds(), MESH, (), mesh_bound

    def _branches(self, base: MeshBound, byte_limit: int) -> Iterator[Node]:
        """Yields a node per recomputation mode that may fit."""
        shared_key = (*base.mesh[:7], base.mesh.fold)  # This key is the same for all variants.
        base.sharded = self._sharded.setdefault(shared_key, base.sharded)
        for branch in base.branches(self.space.recompute, self.space.zeros(base.mesh)):
            if branch.least_bytes() <= byte_limit:
                yield branch.least_s, RECOMPUTE, (), branch

    def _pipelines(self, branch: RecomputeBound) -> Iterator[Node]:
        """Yields a node per assignment of stages to ranks."""
        for pipeline, names in self.pipelines(branch):
            yield pipeline.least_s, PIPELINE, (), (pipeline, names)

    def pipelines(self, branch: RecomputeBound) -> Iterator[tuple[PipelineBound, list[str]]]:
        """Yields every assignment of stages to ranks, with the schedules that use it."""
        mesh = branch.mesh
        cp_methods = branch.base.cp_methods
        for (placement, split, vpp), names in self.shapes.alike(mesh).items():
            shape = self.shapes.shape(placement, names[0], mesh.pp, vpp)
            yield PipelineBound(branch, shape, split, vpp, cp_methods), names

    def _with_transfers(self, item: tuple[PipelineBound, list[str]]) -> Iterator[Node]:
        """Yields the same pipeline with the gradients of its best ZeRO stage bounded."""
        pipeline, _ = item
        yield min(map(pipeline.seconds_of, pipeline.branch.sharded)), SENDING, (), item

    def _cp_methods(
        self, pipeline: PipelineBound, names: list[str], byte_limit: int
    ) -> Iterator[Node]:
        """Yields a node per method of context parallelism, or the layouts if there is one method.

        All methods need the same memory.
        """
        fitting = list(self._fitting(pipeline, names, byte_limit))
        if len(pipeline.cp_methods) == 1:
            yield from self._layouts(pipeline, fitting, byte_limit)
        elif fitting:
            for method in pipeline.cp_methods:
                bound = PipelineBound(
                    pipeline.branch, pipeline.shape, pipeline.split, pipeline.vpp, [method]
                )
                least = min(bound.seconds_of(sharded) for _, sharded, _ in fitting)
                yield least, CP_METHOD, (), (bound, fitting)

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

    def _scheduled(
        self,
        layout: Layout,
        size: float,
        pipeline: PipelineBound,
        sharded: ZeroStage,
        byte_limit: int,
    ) -> Iterator[Node]:
        """Yields the layout with its schedule bounded, if it still fits."""
        least = pipeline.seconds_with(layout.schedule, sharded)
        if size <= byte_limit and pipeline.shape.unequal:
            size = pipeline.bytes_of(pipeline.kept(layout.schedule, exact=True), sharded)
        if size <= byte_limit:
            yield least, SCHEDULED, (), layout

    def _placed(self, layout: Layout) -> Iterator[Node]:
        """Yields the layout in all nesting orders, if it is legal."""
        placed = self.exact_costs.placed(layout)
        if placed is not None:
            yield placed.least_s, PLACED, (), placed

    def _costed(self, placed: PlacedLayout, byte_limit: int) -> Iterator[Node]:
        """Yields the layout with its exact cost, if it fits."""
        costed = self.exact_costs.of_placed(placed, byte_limit)
        if costed is not None:
            tie_breaker = costed.memory.total, preference(costed.layout)
            yield costed.step_s, COSTED, tie_breaker, costed

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """The layer costs of this search."""
        return LayerCosts(self.context, self.best, self.recipe, self.exact_costs.all_to_alls)

    @cached_property
    def shapes(self) -> PipelinesOfMeshes:
        """The pipeline shapes of this search."""
        return PipelinesOfMeshes(self.space, self.par)

    @cached_property
    def par(self) -> doc.Parallel:
        """The `parallel` of some layout; bounds read only fields that all layouts share."""
        mesh = next(mesh for mesh in self.space.meshes() if self.space.count(mesh))
        config = self.space.fixed(next(iter(self.space.layouts(mesh))))
        return make_parallel(config, self.exact_costs.case(config))


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
