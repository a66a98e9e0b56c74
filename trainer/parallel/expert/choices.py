"""Observes the choices of routers where tokens enter the experts of this rank, and sums them over
all ranks with the same layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.model.experts import Enter, MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.model.router import Routing
from trainer.model.stage import Stage
from trainer.parallel.tensor import AXIS

#: Observes (the number of the layer in the model, the routing of this rank's own tokens).
Observer = Callable[[int, Routing], None]


def watch(stage: Stage, terms: LossTerms, observe: Observer) -> dict[int, MixtureOfExperts]:
    """Calls `observe` once with the routing of each micro-batch that counts, before tensor-parallel
    ranks gather tokens; earlier observers stay. Returns the mixtures of the stage by the number of
    their layer."""
    mixtures = {
        int(name): block.mlp
        for name, block in stage.blocks.items()
        if isinstance(block.mlp, MixtureOfExperts)
    }
    for layer, mixture in mixtures.items():
        mixture.enter = _around(layer, mixture.enter, terms, observe)
    return mixtures


def _around(layer: int, enter: Enter, terms: LossTerms, observe: Observer) -> Enter:
    def watched(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        if terms.counts:
            observe(layer, routing)
        return enter(x, routing)

    return watched


def sum_over_ranks(
    rows: list[Tensor],
    mesh: Mesh,
    sp: bool,
    counter: CommCounter,
) -> Tensor:
    """One row per layer -> [layers, ...]: the sums over all ranks with these layers, which see
    different tokens. Collective among them."""
    table = torch.stack(rows)
    if sp:
        table = all_reduce(table, mesh.group("tp"), AXIS, counter)
    return all_reduce(table, mesh.group("grad"), "dp", counter)
