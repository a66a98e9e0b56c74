"""What the routers of a rank choose, in the steps that are sampled: tokens by expert and the
entropy of their scores.

A step that is not sampled costs a comparison a layer. One that is adds to a table on the device,
which the host reads with the step's other numbers: it never waits.
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

#: Columns of a layer's row behind the tokens of its experts.
ENTROPY, TOKENS, DROPPED, LOWEST, HIGHEST = range(5)
_MORE = 5


class ExpertMeter:
    """Sums over the micro-batches of a step. Layers are those of this rank, in model order."""

    def __init__(self, terms: LossTerms):
        self.terms = terms
        self.on = False
        self.mixtures: dict[int, MixtureOfExperts] = {}
        self._rows: dict[int, Tensor] = {}

    def watch(self, stage: Stage) -> None:
        """Look at what the stage's routers choose."""
        self.mixtures |= watch(stage, self.terms, self._look)

    def start(self, on: bool) -> None:
        """Begin a step; `on`: it is sampled."""
        self.on = on and bool(self.mixtures)
        self._rows.clear()

    def totals(self, mesh: Mesh, sp: bool, counter: CommCounter) -> Tensor | None:
        """float64 [layers of this rank, experts + 5] over all ranks with these layers; None if the
        step is not sampled. Collective among them."""
        if not self.on:
            return None
        rows = [
            self._rows.get(layer, self._empty(one)) for layer, one in sorted(self.mixtures.items())
        ]
        table = sum_over_ranks(rows, mesh, sp, counter)
        for row, (_, mixture) in zip(table, sorted(self.mixtures.items()), strict=True):
            if (bias := mixture.router.bias) is not None:
                row[LOWEST - _MORE], row[HIGHEST - _MORE] = bias.min(), bias.max()
        return table

    def loads(self, table: list[list[float]]) -> dict[str, ExpertLoad]:
        """What `totals` has computed, by the number of the layer in the model."""
        loads = {}
        for (layer, mixture), row in zip(sorted(self.mixtures.items()), table, strict=True):
            tokens, (entropy, count, dropped, *bias) = (
                [round(count_of_expert) for count_of_expert in row[:-_MORE]],
                row[-_MORE:],
            )
            share = entropy / (max(count, 1.0) * log(len(tokens))) if len(tokens) > 1 else 0.0
            ends = (bias[0], bias[1]) if mixture.router.bias is not None else None
            loads[str(layer)] = ExpertLoad(tokens, share, dropped / max(sum(tokens), 1), ends)
        return loads

    @torch.no_grad()
    def _look(self, layer: int, routing: Routing) -> None:
        if not self.on:
            return
        row = self._rows.setdefault(layer, self._empty(self.mixtures[layer]))
        row[:-_MORE] += counted(routing.experts, len(row) - _MORE)
        statistics = row[-_MORE:]
        statistics[ENTROPY] += torch.special.entr(routing.scores).sum()
        statistics[TOKENS] += len(routing.experts)
        if routing.accepted is not None:
            statistics[DROPPED] += (~routing.accepted).sum()

    @staticmethod
    def _empty(mixture: MixtureOfExperts) -> Tensor:
        weight = mixture.router.weight
        return torch.zeros(len(weight) + _MORE, dtype=torch.float64, device=weight.device)
