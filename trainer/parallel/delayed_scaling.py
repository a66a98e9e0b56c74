"""The scales of `train.matmul=fp8_delayed` over a run: the largest values of a step become the
newest entry of the history from which later steps take their scales.

A step takes one message, of three numbers per linear of this rank's layers; the host does not wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.model.fp8.delayed import HISTORY, LARGEST_CODES, DelayedOp
from trainer.model.linear import Linear
from trainer.model.loss import LossTerms

#: The axes under which the largest values are sent, and the groups that share layers.
MESSAGES = (
    ("tp", "tp"),
    ("dp", "grad"),
)


class DelayedScales:
    """The histories of this rank's linears, in the order of their names, which all ranks with the
    same layers share."""

    def __init__(self, terms: LossTerms):
        self.terms = terms
        #: Whether an earlier step has filled the histories.
        self.has_history = False
        self._linears: dict[str, Linear] = {}
        self._ops: dict[str, DelayedOp] = {}
        self._current = torch.empty(0)

    def add(self, name: str, linear: Linear, op: DelayedOp) -> None:
        """Adds a linear, whose history has been declared."""
        self._linears[name] = linear
        self._ops[name] = op

    def start(self) -> None:
        """Begins a step."""
        if not self._ops:
            return
        largest = torch.stack(self._histories()).amax(-1)  # [linears, factors]
        unscaled = largest.new_tensor(LARGEST_CODES)
        largest = torch.where(
            largest > 0,
            largest,
            unscaled,
        )
        self._current = torch.zeros_like(largest)
        for number, name in enumerate(sorted(self._ops)):
            self._ops[name].begin(
                largest[number] if self.has_history else None,
                self._current[number],
            )

    def apply(self, finite: Tensor, mesh: Mesh, counter: CommCounter) -> None:
        """Moves the histories on by the step's largest values, unless the step is skipped (`finite`
        is False, 0-d bool). Collective among ranks with the same layers."""
        if not self._ops:
            return
        largest = self._current
        for axis, name in MESSAGES:
            largest = all_reduce(
                largest,
                mesh.group(name),
                axis,
                counter,
                dist.ReduceOp.MAX,
            )
        histories = torch.stack(self._histories())
        moved = torch.cat([largest[..., None], histories[..., :-1]], -1)
        moved = torch.where(finite, moved, histories)
        for history, newest in zip(
            self._histories(),
            moved,
            strict=True,
        ):
            history.copy_(newest)
        self.has_history = True

    def _histories(self) -> list[Tensor]:
        """-> fp32 [factors, steps] of each linear"""
        return [getattr(self._linears[name], HISTORY) for name in sorted(self._linears)]
