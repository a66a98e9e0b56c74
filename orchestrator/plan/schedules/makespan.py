"""Computes only how long a schedule takes: a fast `simulate` for thousands of costs.

The order in which actions wait for each other does not depend on their durations. `Steps` finds it
once; each makespan is then one pass over plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import Action, Kind, ScheduleError
from .schedule import Schedule

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)  # rows of durations


class Steps:
    """A schedule's actions, each after all actions that it waits for."""

    def __init__(self, schedule: Schedule):
        """Orders the actions. Raises ScheduleError if the ranks deadlock."""
        self.stages = len(schedule.stage_rank)
        self._model_stages = schedule.model_stages
        orders = [self._read(order, schedule.micro_batches) for order in schedule.orders]
        total = sum(map(len, orders))
        # Slot -> step. The last slot means "no input", and the step `total` "nothing to wait for".
        done = [-1] * (3 * self.stages * schedule.micro_batches) + [total]
        #: (duration's index, step before it on its rank, first input, second input)
        self.steps: list[tuple[int, int, int, int]] = []
        add = self.steps.append
        count = 0
        moved = True
        Read = tuple[int, int, int, int]
        # (remaining actions, last step, action that it waits to start) of each rank
        waiting: list[tuple[Iterator[Read], int, Read | None]] = [
            (iter(order), total, None) for order in orders
        ]
        while moved:
            moved = False
            for rank, (actions, before, stopped) in enumerate(waiting):
                action = stopped or next(actions, None)
                while action is not None:
                    slot, duration, first, second = action
                    first = done[first]
                    second = done[second]
                    if first < 0 or second < 0:
                        break
                    add((duration, before, first, second))
                    done[slot] = before = count
                    count = count + 1
                    moved = True
                    action = next(actions, None)
                waiting[rank] = actions, before, action
        if count < total:
            raise ScheduleError(f"schedule {schedule.name} deadlocks")

    def _read(self, order: Sequence[Action], batches: int) -> list[tuple[int, int, int, int]]:
        """Lists (slot of the result, index of the duration, slots of the inputs) of each action; -1
        means no input. The results of a B and an I have the same slot."""
        forward = Kind.F
        weight = Kind.W
        backward = Kind.B  # read once: attributes of an enumeration are slow
        stages = self.stages
        model_stages = self._model_stages
        read = []
        for kind, stage, micro_batch in order:
            slot = 3 * (stage * batches + micro_batch)
            if kind is forward:
                read.append(
                    (
                        slot,
                        FORWARD * stages + stage,
                        slot - 3 * batches if stage % model_stages else -1,
                        -1,
                    )
                )
            elif kind is weight:
                read.append((slot + 2, WEIGHT * stages + stage, slot + 1, -1))
            else:
                row = BACKWARD if kind is backward else INPUT
                after = slot + 1 + 3 * batches if (stage + 1) % model_stages else -1
                read.append((slot + 1, row * stages + stage, slot, after))
        return read

    def makespan(
        self,
        forward: Sequence[float],
        backward_input: Sequence[float],
        backward_weight: Sequence[float],
    ) -> float:
        """Seconds from the first start to the last end. Each cost has one number per model stage,
        like in `simulate.Costs`."""
        copies = self.stages // self._model_stages
        both = [i + w for i, w in zip(backward_input, backward_weight, strict=True)]
        durations = [
            seconds
            for row in (forward, both, backward_input, backward_weight)
            for seconds in [*row] * copies
        ]
        ends = [0.0] * (len(self.steps) + 1)
        for index, (duration, before, first, second) in enumerate(self.steps):
            start = ends[before]
            if ends[first] > start:
                start = ends[first]
            if ends[second] > start:
                start = ends[second]
            ends[index] = start + durations[duration]
        return max(ends)
