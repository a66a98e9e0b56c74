"""Recomputes the steps of a run from the state that the step before has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .choices import Choices
from .data import Batch, Reader
from .network import Counts, Network, Pass, Tensors
from .state import State


class Recomputation:
    """Computes a step exactly, and as one process of the run's precision does."""

    def __init__(self, plan: dict[str, Any], reader: Reader, precision: torch.dtype):
        self.reader = reader
        self.precision = precision
        self.wide = torch.promote_types(precision, torch.float32)  # of summed gradients
        self.micro_batch_size = plan["parallel"]["micro_batch_size"]
        self.exact_network = Network(plan["model"], torch.float64)
        self.network = Network(plan["model"], precision)

    def _weights(self, state: State) -> Tensors:
        """Returns the weights with which the run computes: rounded to its precision."""
        return {name: weight.to(self.precision) for name, weight in state.tensors["master"].items()}

    def exact(self, before: State, choices: Choices) -> Pass:
        """Computes the whole step at once, in fp64."""
        batch = self.reader.batch(before.samples)
        return self.exact_network.run(
            self._weights(before),
            batch,
            _counts(batch),
            scale=1.0,
            choices=choices,
            loads=before.loads(),
        )

    def rounded(self, before: State, choices: Choices, scale: float, together: int = 1) -> Pass:
        """Computes the step in the run's precision: micro-batch by micro-batch (`together` of them
        at once), with gradients summed in the wide dtype. Gradients are not finite where fp16
        overflows."""
        batch = self.reader.batch(before.samples)
        size = self.micro_batch_size * together
        weights = self._weights(before)
        counts = _counts(batch)
        loads = before.loads()
        total = Tensors()
        passes = list[Pass]()
        # The order differs from that of the exact computation.
        for first in reversed(range(0, len(batch.tokens), size)):
            samples = slice(first, first + size)
            micro_pass = self.network.run(
                weights,
                batch.rows(samples),
                counts,
                scale=scale,
                choices=choices.rows(samples),
                loads=loads,
            )
            passes.insert(0, micro_pass)
            for name, grad in micro_pass.grads.items():
                total[name] = total.get(name, 0) + grad.to(self.wide)
        return merged(passes, {name: grad / scale for name, grad in total.items()})


def _counts(batch: Batch) -> Counts:
    return Counts(batch.valid, len(batch.tokens), batch.tokens.numel())


def finite(grads: Tensors) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads.values())


def merged(passes: Sequence[Pass], grads: Tensors) -> Pass:
    """Returns the passes of a step's micro-batches, in the order of their samples, as one pass."""
    return replace(
        passes[0],
        grads=grads,
        losses=torch.cat([micro_pass.losses for micro_pass in passes]),
        terms=_concatenated([micro_pass.terms for micro_pass in passes]),
        scores=_concatenated([micro_pass.scores for micro_pass in passes]),
        logits=_concatenated([micro_pass.logits for micro_pass in passes]),
        weights=_concatenated([micro_pass.weights for micro_pass in passes]),
    )


def _concatenated(mappings: Sequence[Mapping[Any, Tensor]]) -> dict[Any, Tensor]:
    return {key: torch.cat([tensors[key] for tensors in mappings]) for key in mappings[0]}
