"""Resolves `train.recompute=budget`: a mode per layer, with the least recomputation that fits.

The modes are none, selective and full. All layers of a pipeline rank are equal, so only the number
of layers in each mode matters: every pair of counts is tried with the memory model that the plan
prints. Micro-batches in flight differ by rank (with 1F1B the first rank has most), and so do the
modes.
"""

from __future__ import annotations

from msgspec import structs

from orchestrator.cost.dual import value_of
from orchestrator.cost.model.stages import rank_parameters, rank_stages, stage_range
from orchestrator.cost.profile import shipped
from orchestrator.cost.rates import rates
from orchestrator.cost.software import SOFTWARE
from orchestrator.cost.time.compute import layer_seconds
from orchestrator.cost.workload import Workload
from orchestrator.plan import document as doc
from orchestrator.plan.document import Cluster, Train

from .activations import activations, backward_bytes, loss_bytes
from .kernels import Kernels
from .rank_memory import buffers, rank_state_bytes, step_weights
from .recipe import ORCH, Recipe, kernels_of

GIB = 1 << 30
MODES: tuple[doc.Recompute, ...] = ("none", "selective", "full")


def resolve_recompute(
    workload: Workload,
    cluster: Cluster,
    budget_gib: float | None,
    recipe: Recipe = ORCH,
    matmul: str = "",
) -> Train:
    """Returns `train` with `recompute_layers` filled in if it asks for a budget.

    With `budget_gib` None, the budget is all free memory. If nothing fits, every layer of that rank
    is fully recomputed, and the plan reports that it does not fit.
    """
    train = workload.train
    model = workload.model
    parallel = workload.parallel
    if train.recompute != "budget":
        return train
    buffer_bytes = buffers(workload, cluster, recipe)
    kernels = kernels_of(recipe, cluster, model, parallel, matmul)
    modes = dict.fromkeys(range(model.layers), 0)
    for pp_rank, stages in enumerate(rank_stages(parallel)):
        layers = [layer for stage in stages for layer in stage_range(parallel, stage)]
        dense, experts = rank_parameters(model, parallel)[pp_rank]
        states = rank_state_bytes(dense, experts, parallel, train, recipe)
        has_loss = len(parallel.stage_layers) - 1 in stages
        loss = loss_bytes(workload, kernels) if has_loss else 0.0
        loss = max(loss, backward_bytes(workload, kernels))
        free_bytes = recipe.tensor_bytes(recipe.capacity(cluster)) - buffer_bytes - loss
        free_bytes -= states.on_device + step_weights(workload, (dense, experts), recipe)
        budget = free_bytes if budget_gib is None else budget_gib * GIB
        layer_modes = _cheapest(
            workload,
            cluster,
            pp_rank,
            layers,
            budget=budget,
            kernels=kernels,
        )
        for layer, mode in zip(layers, layer_modes, strict=True):
            # In a bidirectional pipeline two ranks hold a layer: the tighter one decides.
            modes[layer] = max(modes[layer], mode)
    return structs.replace(
        train,
        recompute_layers=[MODES[modes[layer]] for layer in range(model.layers)],
    )


def _cheapest(
    workload: Workload,
    cluster: Cluster,
    pp_rank: int,
    layers: list[int],
    budget: float,
    kernels: Kernels,
) -> list[int]:
    """Returns the mode (index into MODES) of each of a rank's layers.

    Layers with the most recomputation come first.
    """
    train = workload.train
    model = workload.model
    parallel = workload.parallel
    if not layers:
        return []
    rate = rates(cluster, shipped().values, train.precision, SOFTWARE["orch"])
    layer = layer_seconds(
        Workload(model, parallel, train, SOFTWARE["orch"]),
        layers[-1],
        rate,
    )
    layer_count = len(layers)
    choices = sorted(
        (
            full * value_of(layer.full) + selective * value_of(layer.selective),
            full,
            selective,
        )
        for full in range(layer_count + 1)
        for selective in range(layer_count + 1 - full)
    )
    for _, full, selective in choices:
        layer_modes = [2] * full + [1] * selective + [0] * (layer_count - full - selective)
        modes = dict(zip(layers, layer_modes, strict=True))
        if _bytes(workload, pp_rank, modes, kernels) <= budget:
            return layer_modes
    return [2] * layer_count


def _bytes(
    workload: Workload,
    pp_rank: int,
    modes: dict[int, int],
    kernels: Kernels,
) -> float:
    """Returns the activation bytes of a pipeline rank with these modes."""
    train = workload.train
    model = workload.model
    parallel = workload.parallel
    by_layer = [MODES[modes.get(layer, 0)] for layer in range(model.layers)]
    return activations(
        Workload(
            model,
            parallel,
            structs.replace(train, recompute_layers=by_layer),
            isolated=workload.isolated,
        ),
        kernels,
    )[pp_rank]
