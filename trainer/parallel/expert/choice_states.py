"""The state that routers keep of a step's choices: biases that move towards an equal load without a
term of the loss (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2), and the load that
the next step's term balances.

Choices are counted over the whole global batch, so every layout keeps the same state. Each step
makes one sum, of one whole number per expert of this rank's layers; the host does not wait.
"""

from __future__ import annotations

import torch
from msgspec import UNSET
from torch import Tensor

from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.model.balance import bias_change, load_of
from trainer.model.experts import MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.model.permutation import counted
from trainer.model.router import Routing
from trainer.model.stage import Stage

from .choices import sum_over_ranks, watch


class ChoiceStates:
    """The biases and loads of this rank's layers, in model order, if the plan has any."""

    def __init__(self, terms: LossTerms):
        self.terms = terms
        self.mixtures: dict[int, MixtureOfExperts] = {}
        #: int64 [experts] by layer: the choices of this rank's tokens in the step.
        self._chosen: dict[int, Tensor] = {}

    def watch(self, stage: Stage) -> None:
        """Counts the choices of the stage's routers."""
        self.mixtures |= watch(stage, self.terms, self._count)

    def start(self) -> None:
        """Begins a step."""
        self._chosen.clear()

    def apply(self, finite: Tensor, mesh: Mesh, sp: bool, counter: CommCounter) -> None:
        """Updates biases and loads by the step's choices, unless the step is skipped (`finite` is
        False, 0-d bool). Collective among ranks with the same layers."""
        if not self.mixtures:
            return
        layers = sorted(self.mixtures.items())
        rows = [self._chosen.get(layer, self._empty(mixture)) for layer, mixture in layers]
        chosen = sum_over_ranks(rows, mesh, sp, counter)
        for (_, layer_mixture), counts in zip(layers, chosen, strict=True):
            router = layer_mixture.router
            speed = router.moe.bias_update
            if router.bias is not None and speed is not UNSET:
                router.bias += bias_change(counts, speed) * finite
            if router.load is not None:
                router.load.copy_(torch.where(finite, load_of(counts), router.load))

    def _count(self, layer: int, routing: Routing) -> None:
        row = self._chosen.setdefault(layer, self._empty(self.mixtures[layer]))
        row += counted(routing.experts, len(row))

    @staticmethod
    def _empty(mixture: MixtureOfExperts) -> Tensor:
        weight = mixture.router.weight
        return torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
