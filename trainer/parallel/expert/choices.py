"""What routers choose, seen where tokens enter the experts of this rank, and summed over all ranks
with its layers."""

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

#: (number of the layer in the model, routing of this rank's own tokens)
Look = Callable[[int, Routing], None]


def watch(stage: Stage, terms: LossTerms, look: Look) -> dict[int, MixtureOfExperts]:
    """Have `look` see the routing of each micro-batch that counts, once, before tensor-parallel
    ranks gather tokens; what was put there before stays. The mixtures of the stage by their layer's
    number."""
    mixtures = {
        int(name): block.mlp
        for name, block in stage.blocks.items()
        if isinstance(block.mlp, MixtureOfExperts)
    }
    for layer, mixture in mixtures.items():
        mixture.enter = _around(layer, mixture.enter, terms, look)
    return mixtures


def _around(layer: int, enter: Enter, terms: LossTerms, look: Look) -> Enter:
    def watched(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        if terms.counts:
            look(layer, routing)
        return enter(x, routing)

    return watched


def sum_over_ranks(rows: list[Tensor], mesh: Mesh, sp: bool, counter: CommCounter) -> Tensor:
    """One row a layer -> [layers, ...]: the sums over all ranks with these layers, which see other
    tokens. Collective among them."""
    table = torch.stack(rows)
    if sp:
        table = all_reduce(table, mesh.group("tp"), AXIS, counter)
    return all_reduce(table, mesh.group("grad"), "dp", counter)
