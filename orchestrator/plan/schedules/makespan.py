"""How long a schedule takes, and nothing else: `simulate` for those who ask a thousand times.

The order in which actions wait for each other does not depend on their durations. `Steps` finds it once; a makespan is
then one pass over plain numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Kind, ScheduleError
from .schedule import Schedule

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)  # rows of durations


class Steps:
    """A schedule's actions, each behind everything that it waits for."""

    def __init__(self, schedule: Schedule):
        """Raises ScheduleError if ranks wait for each other for ever."""
        self.stages, self._model_stages, self._batches = (
            len(schedule.stage_rank),
            schedule.model_stages,
            schedule.micro_batches,
        )
        orders = [[self._read(action) for action in order] for order in schedule.orders]
        total = sum(map(len, orders))
        done = [-1] * (3 * self.stages * schedule.micro_batches)  # slot -> step
        #: (duration's index, step before it on its rank, inputs); the step `total` stands for "nothing to wait for"
        self.steps: list[tuple[int, int, int, int]] = []
        position, last = [0] * len(orders), [total] * len(orders)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                while position[rank] < len(order):
                    slot, duration, first, second = order[position[rank]]
                    first = total if first < 0 else done[first]
                    second = total if second < 0 else done[second]
                    if first < 0 or second < 0:
                        break
                    done[slot] = len(self.steps)
                    self.steps.append((duration, last[rank], first, second))
                    last[rank] = done[slot]
                    position[rank] += 1
                    moved = True
        if len(self.steps) < total:
            raise ScheduleError(f"schedule {schedule.name} deadlocks")

    def _read(self, action: Action) -> tuple[int, int, int, int]:
        """(slot of its result, duration's index, slots of its inputs; -1: none). A B and an I give the same result."""
        kind, stage, micro_batch = action
        base = 3 * (stage * self._batches + micro_batch)
        if kind is Kind.F:
            first = stage % self._model_stages == 0
            return base, FORWARD * self.stages + stage, -1 if first else base - 3 * self._batches, -1
        if kind is Kind.W:
            return base + 2, WEIGHT * self.stages + stage, base + 1, -1
        row = BACKWARD if kind is Kind.B else INPUT
        last = (stage + 1) % self._model_stages == 0
        return base + 1, row * self.stages + stage, base, -1 if last else base + 1 + 3 * self._batches

    def makespan(self, forward: Sequence[float], backward_input: Sequence[float], backward_weight: Sequence[float]):
        """Seconds from the first start to the last end. One number a model stage each, as `simulate.Costs`."""
        copies = self.stages // self._model_stages
        both = [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
        durations = [seconds for row in (forward, both, backward_input, backward_weight) for seconds in [*row] * copies]
        ends = [0.0] * (len(self.steps) + 1)
        for index, (duration, before, first, second) in enumerate(self.steps):
            start = ends[before]
            if ends[first] > start:
                start = ends[first]
            if ends[second] > start:
                start = ends[second]
            ends[index] = start + durations[duration]
        return max(ends)
