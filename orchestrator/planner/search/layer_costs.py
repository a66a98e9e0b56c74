"""Caches the layer costs of a search: each is computed once for all meshes that share it."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from orchestrator.cost.context import CostContext
from orchestrator.cost.memory.recipe import Recipe
from orchestrator.plan.document import AllToAll, Parallel
from orchestrator.plan.expert_mesh import expert_mesh

from .best_paths import BestPaths
from .layer_cost import LayerCost
from .layout import Mesh
from .shard_params import ShardParams, shard_params

#: The fields of a mesh on which the cost of a layer depends.
DEGREES = ("tp", "cp", "ep", "etp", "fold_cp", "sp", "micro_batch_size", "cp_method")


class LayerCosts:
    """Layer costs, keyed by what they depend on. The costs of one search share their parts."""

    def __init__(
        self,
        context: CostContext,
        best: BestPaths,
        recipe: Recipe,
        all_to_alls: tuple[AllToAll, ...],
    ):
        self.context = context
        self.best = best
        self.recipe = recipe
        self.all_to_alls = all_to_alls
        self._costs: dict[tuple[object, ...], LayerCost] = {}
        self._shared: dict[tuple[object, ...], Any] = {}
        self._params: dict[tuple[int, tuple[int, int]], ShardParams] = {}

    def of_mesh(self, mesh: Mesh, layout: Parallel) -> LayerCost:
        """Returns the cost of a layer in `mesh`.

        `layout` is an arbitrary one, which supplies the fields that all layouts share.
        """
        key = *mesh[:3], mesh.fold, mesh.sp, mesh.micro_batch_size, mesh.cp_method == "ring"
        if key not in self._costs:
            degrees = {name: getattr(mesh, name) for name in DEGREES}
            self._costs[key] = LayerCost(
                self.context.completed(structs.replace(layout, **degrees)),
                mesh,
                self.context,
                best=self.best,
                params=self._shard_params(mesh),
                recipe=self.recipe,
                shared=self._shared,
                all_to_alls=self.all_to_alls,
            )
        return self._costs[key]

    def _shard_params(self, mesh: Mesh) -> ShardParams:
        """Returns the parameters on one rank of a mesh, computed once per tp and expert mesh."""
        experts = expert_mesh(mesh)
        cut = mesh.tp, (experts.etp, experts.ep)
        if cut not in self._params:
            self._params[cut] = shard_params(self.context.model, *cut)
        return self._params[cut]
