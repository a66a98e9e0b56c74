"""The result of a step: numbers and times that the host reads once the device has computed them.

On CUDA the host runs ahead: it enqueues a copy of the numbers into page-locked memory and an event
after it, then the next step, and only then waits for that event. The device always has work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.comm.collectives import LEVELS, CommAccount
from trainer.pipeline.action_times import StepActions

if TYPE_CHECKING:
    from trainer.engine import Engine


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: by phase, by axis of communication, and between its pipeline actions. On a
    GPU they come from events, for `measured` steps only; of other steps phases are the host's."""

    measured: bool
    phase_s: dict[str, float]
    comm_s: dict[str, float]
    level_s: dict[str, float]  # part of `comm_s`: to experts on other ranks, by level
    idle_s: float


class StepResult:
    """Created when a step is enqueued; `wait` and then `times` may be called once the next step
    is."""

    def __init__(
        self,
        engine: Engine,
        values: Sequence[Tensor],
        measured: bool,
        table: Tensor | None = None,
    ):
        """Closes the step's accounts of times and bytes. `values` are 0-d tensors on the engine's
        device, `table` is that of `engine.expert_loads`, before the update."""
        self._cuda = engine.device.type == "cuda"
        self.measured = measured
        numbers = torch.stack([value.detach().double() for value in values])
        self._count = len(numbers)
        self._width = 0
        if table is not None:
            engine.part.expert_meter.add_biases(table)
            numbers = torch.cat([numbers, table.double().flatten()])
            self._width = table.shape[1]
        self._event: torch.cuda.Event | None = None
        if self._cuda:
            arriving = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            arriving.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a waiting host sleeps
            self._event.record()
            numbers = arriving
        self._numbers = numbers
        self._comm: CommAccount = engine.counter.close()
        self._phases: dict[str, float] = engine.timer.take()
        self._actions: StepActions = engine.pipeline.action_times.step
        self.comm_bytes = self._comm.bytes
        self.level_bytes = self._comm.levels

    def wait(self) -> list[float]:
        """Waits for the device and returns the values."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers[: self._count].tolist()

    def table(self) -> list[list[float]]:
        """Returns the rows of the table, or none without a table. Call it after `wait`."""
        if not self._width:
            return []
        return self._numbers[self._count :].view(-1, self._width).tolist()

    def times(self) -> StepTimes:
        """Returns the times without waiting for the device. Call it after `wait`, when the step's
        events have happened."""
        phases = dict(self._phases)
        if self._cuda:
            # The host's seconds of forward and backward only measure how long it enqueues.
            for name in ("forward", "backward"):
                phases.pop(name, None)
            if self.measured:
                phases |= self._actions.seconds_by_pass()
        waited = self._comm.seconds()
        levels = {level: waited.pop(level) for level in LEVELS if level in waited}
        return StepTimes(
            self.measured,
            phases,
            waited,
            levels,
            self._actions.idle_seconds(),
        )


def logged_values(
    engine: Engine,
    loss_sum: Tensor,
    logged: bool,
) -> tuple[tuple[str, ...], list[Tensor]]:
    """Returns the names of a logged step's loss terms, then their totals and, on ranks with the
    last stage, the total loss. Collective."""
    if not logged:
        return (), []
    loss_total = engine.loss_total(loss_sum)
    terms = engine.loss_term_totals()
    totals = list(terms.values())
    return tuple(terms), totals if loss_total is None else [*totals, loss_total]
