"""The choices of a rank's routers in sampled steps: tokens by expert, and the entropy of their
scores.

A step that is not sampled costs one comparison per layer. A sampled step adds to a table on the
device, which the host reads with the step's other numbers, without waiting.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from orchestrator.plan.expert_load import ExpertLoad
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.model.experts import MixtureOfExperts
from trainer.model.loss import LossTerms
from trainer.model.permutation import counted
from trainer.model.router import Routing
from trainer.model.stage import Stage

from .choices import sum_over_ranks, watch

#: Columns of a layer's row after the tokens of its experts.
ENTROPY, TOKENS, DROPPED, LOWEST, HIGHEST = range(5)
STATISTICS = 5


class ExpertMeter:
    """Sums the choices over the micro-batches of a step, for this rank's layers in model order."""

    def __init__(self, terms: LossTerms):
        self.terms = terms
        self.on = False
        self.mixtures: dict[int, MixtureOfExperts] = {}
        self._rows: dict[int, Tensor] = {}

    def watch(self, stage: Stage) -> None:
        """Observes the choices of the stage's routers."""
        self.mixtures |= watch(stage, self.terms, self._observe)

    def start(self, on: bool) -> None:
        """Begins a step; `on`: whether it is sampled."""
        self.on = on and bool(self.mixtures)
        self._rows.clear()

    def totals(self, mesh: Mesh, sp: bool, counter: CommCounter) -> Tensor | None:
        """Returns float64 [layers of this rank, experts + 5], summed over all ranks with these
        layers, still without biases; None if the step is not sampled. Collective among these
        ranks."""
        if not self.on:
            return None
        layers = sorted(self.mixtures.items())
        rows = [self._rows.get(layer, self._empty(mixture)) for layer, mixture in layers]
        return sum_over_ranks(rows, mesh, sp, counter)

    def add_biases(self, table: Tensor) -> None:
        """Writes the range of each router's biases into a table of `totals`. Call it after the
        update, which moves the biases. Sends nothing: all ranks hold the same."""
        for row, (_, mixture) in zip(table, sorted(self.mixtures.items()), strict=True):
            if (bias := mixture.router.bias) is not None:
                statistics = row[-STATISTICS:]
                statistics[LOWEST] = bias.min()
                statistics[HIGHEST] = bias.max()

    def loads(self, table: list[list[float]]) -> dict[str, ExpertLoad]:
        """Returns the loads in a table of `totals`, by the number of the layer in the model."""
        loads = {}
        for (layer, mixture), row in zip(sorted(self.mixtures.items()), table, strict=True):
            tokens = [round(count) for count in row[:-STATISTICS]]
            entropy, token_count, dropped, lowest, highest = row[-STATISTICS:]
            share = 0.0
            if len(tokens) > 1:
                share = entropy / (max(token_count, 1.0) * log(len(tokens)))
            bias = (lowest, highest) if mixture.router.bias is not None else None
            loads[str(layer)] = ExpertLoad(
                tokens,
                share,
                dropped / max(sum(tokens), 1),
                bias,
            )
        return loads

    @torch.no_grad()
    def _observe(self, layer: int, routing: Routing) -> None:
        if not self.on:
            return
        row = self._rows.setdefault(layer, self._empty(self.mixtures[layer]))
        row[:-STATISTICS] += counted(routing.experts, len(row) - STATISTICS)
        statistics = row[-STATISTICS:]
        statistics[ENTROPY] += torch.special.entr(routing.scores).sum()
        statistics[TOKENS] += len(routing.experts)
        if routing.accepted is not None:
            statistics[DROPPED] += (~routing.accepted).sum()

    @staticmethod
    def _empty(mixture: MixtureOfExperts) -> Tensor:
        weight = mixture.router.weight
        return torch.zeros(
            len(weight) + STATISTICS,
            dtype=torch.float64,
            device=weight.device,
        )
