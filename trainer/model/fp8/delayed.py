"""Products in 8 bits whose scales come from earlier steps (delayed scaling, as in NVIDIA's
Transformer Engine).

The scale of a factor belongs to the largest value that the factor had in the last `STEPS` steps. So
it is known before the factor is: within a step no rank waits for the largest value of another's
slice. Larger values become the largest number of the format. The first step has no history; it
takes current values, as `TensorOp` does.

A step's largest values are those of the whole global batch, so every layout has the same scales.
They are state of the linear: saved, resharded and restored with it.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ..linear import Linear
from ..loss import LossTerms
from ..state import State, add_state
from .linears import Shared, TensorOp, same
from .rounding import E4M3, E5M2, Largest, Rounded, round_to

STEPS = 16
HISTORY = "largest"  # the buffer of a linear, newest step first


class Factor(IntEnum):
    """The factors of a linear's products."""

    INPUT = 0
    WEIGHT = 1
    GRAD = 2


FORMATS = (E4M3, E4M3, E5M2)
#: Values whose scale is 1, for a factor that has been zero in all of the last steps.
LARGEST_CODES = tuple(torch.finfo(dtype).max for dtype in FORMATS)


def declare_history(linear: Linear) -> None:
    """Adds the history of its largest values to a linear."""
    add_state(linear, HISTORY, State((len(Factor), STEPS)))


class DelayedOp(TensorOp):
    """Products with one scale per tensor, from the largest values of earlier steps.

    `terms` tells whether an input counts: one that is recomputed has been counted, and that of
    padding never does."""

    def __init__(
        self,
        shared: Shared,
        terms: LossTerms,
        largest_input: Largest = same,
        largest_weight: Largest = same,
        largest_grad: Largest = same,
        fp8_unit: bool = False,
    ):
        super().__init__(
            shared,
            largest_input=largest_input,
            largest_weight=largest_weight,
            largest_grad=largest_grad,
            fp8_unit=fp8_unit,
        )
        self.terms = terms
        #: [factors] that scales belong to; None in the first step.
        self.past: Tensor | None = None
        #: [factors] of this rank's values in this step.
        self.current = torch.zeros(len(Factor))
        self._saw_weight = False

    def begin(self, past: Tensor | None, current: Tensor) -> None:
        """Begins a step with the scales of the largest values `past`, and collects largest values
        in `current`."""
        self.past = past
        self.current = current
        self._saw_weight = False

    def _input(self, x: Tensor) -> Rounded:
        if self.terms.counts:
            self._collect(
                Factor.INPUT,
                self.shared.largest_inputs.get(x, None, lambda: x.detach().abs().amax()),
            )
        if self.past is None:
            return super()._input(x)
        largest = self.past[Factor.INPUT]
        return self.shared.inputs.get(x, self.largest_input, lambda: round_to(x, largest, E4M3))

    def _weight(self, weight: Tensor) -> Rounded:
        if not self._saw_weight:  # it is the same in the whole step
            self._collect(Factor.WEIGHT, weight.detach().abs().amax())
            self._saw_weight = True
        if self.past is None:
            return super()._weight(weight)
        return round_to(weight.detach(), self.past[Factor.WEIGHT], E4M3)

    def _grad(self, grad: Tensor) -> Rounded:
        self._collect(
            Factor.GRAD,
            self.shared.largest_grads.get(grad, None, lambda: grad.abs().amax()),
        )
        if self.past is None:
            return super()._grad(grad)
        largest = self.past[Factor.GRAD]
        return self.shared.grads.get(grad, self, lambda: round_to(grad, largest, E5M2))

    def _collect(self, factor: Factor, largest: Tensor) -> None:
        current = self.current[factor]
        torch.maximum(current, largest.to(current.dtype), out=current)
