"""Balance of experts without a term of the loss: every step moves the biases of the routers' choice towards an equal
load (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

Choices are counted over the whole global batch, wherever its tokens are, so every layout moves the biases alike. One
sum a step, of a whole number for each expert of this rank's layers; the host waits for nothing.
"""

from __future__ import annotations

import torch
from msgspec import UNSET
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.model.balance import bias_change
from trainer.model.experts import Enter, MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.model.router import Routing
from trainer.model.stage import Stage
from trainer.parallel.tensor import AXIS


class BiasBalance:
    """The biases of this rank's layers, in model order; nothing where the plan does not move any."""

    def __init__(self, terms: LossTerms):
        self.terms = terms
        self.mixtures: dict[int, MixtureOfExperts] = {}
        self._chosen: dict[int, Tensor] = {}  # int64 [experts] by layer: this rank's part of the step

    def watch(self, stage: Stage) -> None:
        """Count where tokens enter each mixture of experts, before tensor-parallel ranks gather them."""
        for name, block in stage.blocks.items():
            if isinstance(block.mlp, MixtureOfExperts) and block.mlp.router.bias is not None:
                self.mixtures[int(name)] = block.mlp
                block.mlp.enter = self._around(int(name), block.mlp.enter)

    def start(self) -> None:
        """Begin a step."""
        self._chosen.clear()

    def apply(self, finite: Tensor, mesh: Mesh, sp: bool, counter: CommCounter) -> None:
        """Move the biases by the step's choices, unless the step is skipped (`finite` 0-d bool). Collective among ranks
        with the same layers."""
        if not self.mixtures:
            return
        layers = sorted(self.mixtures.items())
        chosen = torch.stack([self._chosen.get(layer, self._empty(one)) for layer, one in layers])
        if sp:
            chosen = all_reduce(chosen, mesh.group("tp"), AXIS, counter)
        chosen = all_reduce(chosen, mesh.group("grad"), "dp", counter)
        for (_, mixture), counts in zip(layers, chosen, strict=True):
            bias, speed = mixture.router.bias, mixture.router.moe.bias_update
            assert bias is not None and speed is not UNSET, "else nobody watches it"
            bias += bias_change(counts, speed) * finite

    def _around(self, layer: int, enter: Enter) -> Enter:
        def counted(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
            if self.terms.counts:
                row = self._chosen.setdefault(layer, self._empty(self.mixtures[layer]))
                chosen = routing.experts.flatten()
                row.scatter_add_(0, chosen, torch.ones_like(chosen))  # `bincount` would wait for the device
            return enter(x, routing)

        return counted

    @staticmethod
    def _empty(mixture: MixtureOfExperts) -> Tensor:
        weight = mixture.router.weight
        return torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
