"""Simulates lowered programs on GPUs with NCCL. Each rank has two queues: kernels, and batches of
transfers.

A batch is a group call on one communicator: its transfers run together, and the next batch begins
when all of them have ended. A batch begins when all kernels that were enqueued before it have
ended, as torch's streams wait. A transfer ends only after the other rank's batch has also begun
(rendezvous); the n-th send from one rank to another meets the n-th receive there, whatever their
micro-batches are. Kernels run in order; the first that needs a message waits for its batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .actions import COMPUTE, RECEIVES, Action, ScheduleError
from .lower import Batch, other_half, peer_of, receive_of
from .schedule import Schedule
from .simulate import Costs


class DeviceTimes(NamedTuple):
    """Seconds (or units of the costs) of a step, counted from its first kernel."""

    makespan: float
    #: rank -> time in which it waits between its first and its last kernel
    exposed: tuple[float, ...]
    ends: dict[Action, float]  # of every kernel


class _Rank:
    """The queues of one rank and their progress."""

    def __init__(self, batches: Sequence[Batch]):
        #: kernels in order; two actions that run as one are one kernel
        self.kernels = [batch for batch in batches if batch[0].kind in COMPUTE]
        self.batches: list[Batch] = []
        self.before: list[int] = []  # kernels that are enqueued before each batch
        kernels = 0
        for batch in batches:
            if batch[0].kind in COMPUTE:
                kernels += 1
            else:
                self.batches.append(batch)
                self.before.append(kernels)
        self.computed: list[float] = []  # ends of kernels
        self.started: list[float] = []  # of batches
        self.transferred: list[float] = []  # ends of batches
        self.waited = 0.0  # between kernels

    def done(self) -> bool:
        return len(self.computed) == len(self.kernels) and len(self.transferred) == len(
            self.batches
        )


def run_on_device(
    schedule: Schedule,
    programs: Sequence[Sequence[Batch]],
    costs: Costs | None = None,
) -> DeviceTimes:
    """Runs the programs of all ranks (`lower_to_batches`). Raises ScheduleError if they deadlock,
    or if a receive would get another receive's message."""
    _check_pairs(schedule, programs)
    return _Devices(schedule, programs, costs or Costs()).run()


class _Devices:
    """All ranks of one run."""

    def __init__(
        self,
        schedule: Schedule,
        programs: Sequence[Sequence[Batch]],
        costs: Costs,
    ):
        self._schedule = schedule
        self._costs = costs
        self._ranks = [_Rank(program) for program in programs]
        self._batch_of: dict[Action, tuple[int, int]] = {}  # transfer -> (rank, its batch)
        for number, rank in enumerate(self._ranks):
            for index, batch in enumerate(rank.batches):
                self._batch_of.update(dict.fromkeys(batch, (number, index)))
        self._ends: dict[Action, float] = {}  # of kernels

    def run(self) -> DeviceTimes:
        has_progress = True
        while has_progress:
            has_progress = False
            for number, rank in enumerate(self._ranks):
                while self._start_batch(rank) or self._end_batch(rank) or self._compute(number):
                    has_progress = True
        stuck = [number for number, rank in enumerate(self._ranks) if not rank.done()]
        if stuck:
            ranks = [f"rank {number} at {_position(self._ranks[number])}" for number in stuck[:4]]
            raise ScheduleError(
                f"schedule {self._schedule.name} deadlocks on a device: {', '.join(ranks)}"
            )
        last = max((rank.computed[-1] for rank in self._ranks if rank.computed), default=0.0)
        return DeviceTimes(
            last,
            tuple(rank.waited for rank in self._ranks),
            self._ends,
        )

    @staticmethod
    def _start_batch(rank: _Rank) -> bool:
        """Starts the next batch after the previous batch and the kernels enqueued before it."""
        index = len(rank.started)
        if index == len(rank.batches) or len(rank.transferred) < index:
            return False
        kernels = rank.before[index]
        if len(rank.computed) < kernels:
            return False
        previous_batch = rank.transferred[-1] if index else 0.0
        previous_kernel = rank.computed[kernels - 1] if kernels else 0.0
        rank.started.append(max(previous_batch, previous_kernel))
        return True

    def _end_batch(self, rank: _Rank) -> bool:
        """Ends the current batch once the batches of all its peers have started."""
        index = len(rank.transferred)
        if index == len(rank.started):
            return False
        transfer = self._costs.transfer
        start = end = rank.started[index]
        for action in rank.batches[index]:
            peer, batch = self._batch_of[other_half(action)]
            peer_started = self._ranks[peer].started
            if batch >= len(peer_started):
                return False
            end = max(end, peer_started[batch] + transfer, start + transfer)
        rank.transferred.append(end)
        return True

    def _compute(self, number: int) -> bool:
        """Runs the next kernel of a rank once its inputs have arrived."""
        rank = self._ranks[number]
        if len(rank.computed) == len(rank.kernels):
            return False
        kernel = rank.kernels[len(rank.computed)]
        arrivals = []
        for action in kernel:
            for source in self._schedule.needs(action):
                arrival = self._arrival(source, number)
                if arrival is None:
                    return False
                arrivals.append(arrival)
        free = rank.computed[-1] if rank.computed else 0.0
        start = max([free, *arrivals])
        if rank.computed:
            rank.waited += start - free
        end = start + self._seconds(kernel)
        self._ends.update(dict.fromkeys(kernel, end))
        rank.computed.append(end)
        return True

    def _arrival(self, source: Action, number: int) -> float | None:
        """The time at which the result of `source` is on a rank; None if it has not arrived."""
        if self._schedule.stage_rank[source.stage] == number:
            return 0.0 if source in self._ends else None  # kernels of a rank run in order
        receive = receive_of(self._schedule, source)
        assert receive is not None
        _, batch = self._batch_of[receive]
        transferred = self._ranks[number].transferred
        return transferred[batch] if batch < len(transferred) else None

    def _seconds(self, kernel: Batch) -> float:
        costs = self._costs
        if len(kernel) > 1 and costs.together is not None:
            return costs.together
        model_stage = self._schedule.model_stage
        return sum(costs.of(action.kind, model_stage(action.stage)) for action in kernel)


def _check_pairs(schedule: Schedule, programs: Sequence[Sequence[Batch]]) -> None:
    """Raises ScheduleError unless the n-th send from each rank to another has the message of the
    n-th receive there."""
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for rank, batches in enumerate(programs):
        for action in (
            action for batch in batches for action in batch if action.kind not in COMPUTE
        ):
            peer = peer_of(schedule, action)
            if action.kind in RECEIVES:
                receives.setdefault((peer, rank), []).append(action)
            else:
                sends.setdefault((rank, peer), []).append(other_half(action))
    for pair in sends.keys() | receives.keys():
        sent = sends.get(pair, [])
        received = receives.get(pair, [])
        if sent != received:
            wrong = next(
                (at for at, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b),
                None,
            )
            difference = (
                f"message {wrong}"
                if wrong is not None
                else f"{len(sent)} sends, {len(received)} receives"
            )
            raise ScheduleError(
                f"schedule {schedule.name}: rank {pair[0]} sends to rank {pair[1]} in another order"
                f" than that receives ({difference})"
            )
    counts = Counter(action for batches in programs for batch in batches for action in batch)
    if repeated := next((action for action, times in counts.items() if times > 1), None):
        raise ScheduleError(f"schedule {schedule.name}: {repeated} happens twice")


def _position(rank: _Rank) -> str:
    remaining = rank.kernels[len(rank.computed) :]
    kernel = " ".join(map(str, remaining[0])) if remaining else "its end"
    transfer = len(rank.transferred)
    waiting = (
        " ".join(map(str, rank.batches[transfer]))
        if transfer < len(rank.batches)
        else "no transfer"
    )
    return f"{kernel} with {waiting}"
