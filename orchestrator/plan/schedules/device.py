"""Lowered programs as GPUs with NCCL run them: two queues a rank, one of kernels and one of batches
of transfers.

A batch is a group call on one communicator: its transfers run together, the next batch begins when
all of them have ended. It begins when all that was enqueued before it has been computed, as torch's
streams wait. A transfer ends only if the other rank's batch has begun too (rendezvous); the n-th
send of a rank to another meets the n-th receive there, whatever they were meant for. Kernels run in
order; the first that needs a message waits for that message's batch.
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
    """Seconds (or units of the costs) of a step, from its first kernel."""

    makespan: float
    exposed: tuple[
        float, ...
    ]  # rank -> time in which its kernels wait between the first and the last of them
    ends: dict[Action, float]  # of every kernel


class _Rank:
    """The queues of one rank, and how far they have come."""

    def __init__(self, batches: Sequence[Batch]):
        self.kernels = [
            batch for batch in batches if batch[0].kind in COMPUTE
        ]  # two that run as one are one
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
    schedule: Schedule, programs: Sequence[Sequence[Batch]], costs: Costs | None = None
) -> DeviceTimes:
    """Run the programs of all ranks (`lower_to_batches`). Raises ScheduleError if they wait for
    ever, or if a receive would get another message than its own."""
    costs = costs or Costs()
    _check_pairs(schedule, programs)
    ranks = [_Rank(program) for program in programs]
    batch_of: dict[Action, tuple[int, int]] = {}  # transfer -> (rank, its batch)
    for number, queues in enumerate(ranks):
        batch_of.update(
            (action, (number, at)) for at, batch in enumerate(queues.batches) for action in batch
        )
    ends: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while (
                _start_batch(rank)
                or _end_batch(rank, ranks, batch_of, costs)
                or (_compute(schedule, number, rank, ranks, batch_of, ends, costs))
            ):
                moved = True
    stuck = [number for number, rank in enumerate(ranks) if not rank.done()]
    if stuck:
        where = ", ".join(f"rank {number} at {_at(ranks[number])}" for number in stuck[:4])
        raise ScheduleError(f"schedule {schedule.name} deadlocks on a device: {where}")
    last = max((rank.computed[-1] for rank in ranks if rank.computed), default=0.0)
    return DeviceTimes(last, tuple(rank.waited for rank in ranks), ends)


def _start_batch(rank: _Rank) -> bool:
    at = len(rank.started)
    if (
        at == len(rank.batches)
        or len(rank.transferred) < at
        or len(rank.computed) < rank.before[at]
    ):
        return False
    behind = rank.transferred[-1] if at else 0.0
    rank.started.append(max(behind, rank.computed[rank.before[at] - 1] if rank.before[at] else 0.0))
    return True


def _end_batch(
    rank: _Rank, ranks: list[_Rank], batch_of: dict[Action, tuple[int, int]], costs: Costs
) -> bool:
    at = len(rank.transferred)
    if at == len(rank.started):
        return False
    end = rank.started[at]
    for action in rank.batches[at]:
        peer, batch = batch_of[other_half(action)]
        if batch >= len(ranks[peer].started):
            return False
        end = max(
            end, ranks[peer].started[batch] + costs.transfer, rank.started[at] + costs.transfer
        )
    rank.transferred.append(end)
    return True


def _compute(
    schedule: Schedule, number: int, rank: _Rank, ranks: list[_Rank], batch_of: dict[Action, tuple[int, int]],
    ends: dict[Action, float], costs: Costs,
) -> bool:  # fmt: skip
    if len(rank.computed) == len(rank.kernels):
        return False
    group = rank.kernels[len(rank.computed)]
    free = start = rank.computed[-1] if rank.computed else 0.0
    for source in (source for action in group for source in schedule.needs(action)):
        if schedule.stage_rank[source.stage] == number:
            if source not in ends:
                return False
            continue
        receive = receive_of(schedule, source)
        assert receive is not None
        _, batch = batch_of[receive]
        if batch >= len(rank.transferred):
            return False
        start = max(start, rank.transferred[batch])
    if rank.computed:
        rank.waited += start - free
    seconds = sum(costs.of(action.kind, schedule.model_stage(action.stage)) for action in group)
    end = start + (seconds if len(group) == 1 or costs.together is None else costs.together)
    ends.update(dict.fromkeys(group, end))
    rank.computed.append(end)
    return True


def _check_pairs(schedule: Schedule, programs: Sequence[Sequence[Batch]]) -> None:
    """Raise ScheduleError unless the n-th send of each rank to another is what that one's n-th
    receive is for."""
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
                (at for at, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b), None
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


def _at(rank: _Rank) -> str:
    remaining = rank.kernels[len(rank.computed) :]
    kernel = " ".join(map(str, remaining[0])) if remaining else "its end"
    transfer = len(rank.transferred)
    waiting = (
        " ".join(map(str, rank.batches[transfer]))
        if transfer < len(rank.batches)
        else "no transfer"
    )
    return f"{kernel} with {waiting}"
