"""What a step gave: numbers and times that the host reads later, when the device has computed them.

On CUDA the host runs ahead: it enqueues a copy of the numbers into page-locked memory and an event after it, then the
next step, and only then waits for that event. The device always has work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.comm.collectives import CommAccount
from trainer.pipeline.action_times import StepActions

if TYPE_CHECKING:
    from trainer.engine import Engine


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: by phase, by axis of communication, and between its pipeline actions. On a GPU only of steps
    that were `measured`, by events; phases are the host's otherwise."""

    measured: bool
    phase_s: dict[str, float]
    comm_s: dict[str, float]
    idle_s: float


class StepResult:
    """Made when a step is enqueued; `wait` and then `times` may be called once the next one is."""

    def __init__(self, engine: Engine, values: Sequence[Tensor], measured: bool):
        """`values`: 0-d tensors on the engine's device. Closes the step's accounts of times and bytes."""
        self._cuda, self.measured = engine.device.type == "cuda", measured
        numbers = torch.stack([value.detach().double() for value in values])
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

    def wait(self) -> list[float]:
        """The values, when the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()

    def times(self) -> StepTimes:
        """After `wait`: the step's events have happened, so reading them waits for nothing."""
        phases = dict(self._phases)
        if self._cuda:  # what the host took to enqueue forward and backward says nothing
            phases = {name: spent for name, spent in phases.items() if name not in ("forward", "backward")}
            phases |= self._actions.seconds_by_pass() if self.measured else {}
        return StepTimes(self.measured, phases, self._comm.seconds(), self._actions.idle_seconds())
