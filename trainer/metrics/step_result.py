"""What a step gave: numbers and times that the host reads later, when the device has computed them.

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
    GPU only of steps that were `measured`, by events; phases are the host's otherwise."""

    measured: bool
    phase_s: dict[str, float]
    comm_s: dict[str, float]
    level_s: dict[str, float]  # of it, to experts on other ranks, by level
    idle_s: float


class StepResult:
    """Made when a step is enqueued; `wait` and then `times` may be called once the next one is."""

    def __init__(
        self, engine: Engine, values: Sequence[Tensor], measured: bool, table: Tensor | None = None
    ):
        """`values`: 0-d tensors on the engine's device, `table`: one of 2-d. Closes the step's
        accounts of times and bytes."""
        self._cuda = engine.device.type == "cuda"
        self.measured = measured
        numbers = torch.stack([value.detach().double() for value in values])
        self._count = len(numbers)
        self._width = 0
        if table is not None:
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
        """The values, when the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers[: self._count].tolist()

    def table(self) -> list[list[float]]:
        """After `wait`: the rows of the table, none without."""
        return self._numbers[self._count :].view(-1, self._width).tolist() if self._width else []

    def times(self) -> StepTimes:
        """After `wait`: the step's events have happened, so reading them waits for nothing."""
        phases = dict(self._phases)
        if self._cuda:  # what the host took to enqueue forward and backward says nothing
            phases = {
                name: spent for name, spent in phases.items() if name not in ("forward", "backward")
            }
            phases |= self._actions.seconds_by_pass() if self.measured else {}
        waited = self._comm.seconds()
        levels = {level: waited.pop(level) for level in LEVELS if level in waited}
        return StepTimes(self.measured, phases, waited, levels, self._actions.idle_seconds())
