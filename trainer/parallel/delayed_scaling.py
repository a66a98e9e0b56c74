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


class DelayedScales:
    """The histories of this rank's linears, in the order of their names, which all ranks with the
    same layers share."""

    def __init__(self, terms: LossTerms):
        self.terms = terms
        #: Whether an earlier step has filled the histories.
        self.known = False
        self._ops: dict[str, tuple[Linear, DelayedOp]] = {}
        self._current = torch.empty(0)

    def add(self, name: str, linear: Linear, op: DelayedOp) -> None:
        """Adds a linear, whose history has been declared."""
        self._ops[name] = (linear, op)

    def start(self) -> None:
        """Begins a step."""
        if not self._ops:
            return
        histories = self._histories()
        largest = histories.amax(-1)
        unscaled = largest.new_tensor(LARGEST_CODES).expand_as(largest)
        largest = torch.where(largest > 0, largest, unscaled)
        self._current = torch.zeros_like(largest)
        for number, name in enumerate(sorted(self._ops)):
            _, op = self._ops[name]
            op.begin(largest[number] if self.known else None, self._current[number])

    def apply(self, finite: Tensor, mesh: Mesh, counter: CommCounter) -> None:
        """Moves the histories on by the step's largest values, unless the step is skipped (`finite`
        is False, 0-d bool). Collective among ranks with the same layers."""
        if not self._ops:
            return
        largest = self._current
        for axis, group in (("tp", mesh.group("tp")), ("dp", mesh.group("grad"))):
            largest = all_reduce(largest, group, axis, counter, dist.ReduceOp.MAX)
        histories = self._histories()
        moved = torch.cat([largest[..., None], histories[..., :-1]], -1)
        histories = torch.where(finite, moved, histories)
        for name, history in zip(sorted(self._ops), histories, strict=True):
            getattr(self._ops[name][0], HISTORY).copy_(history)
        self.known = True

    def _histories(self) -> Tensor:
        """-> fp32 [linears, factors, steps]"""
        return torch.stack([getattr(self._ops[name][0], HISTORY) for name in sorted(self._ops)])
