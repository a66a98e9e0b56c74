"""Turns compute orders into full programs, with sends and receives in an order that cannot
deadlock.

Both halves of a transfer get the same position in one global order: the moment when the producer
ends, in a simulation with the stages' costs. Every rank's program is a sub-sequence of that order,
so the programs finish even if each send blocks until its receive runs (rendezvous). Any two ranks
list their mutual transfers in the same order, as NCCL requires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import itemgetter

from .actions import COMPUTE, RECEIVES, Action, Kind
from .schedule import Schedule
from .simulate import Costs, Span, groups, simulate

Program = tuple[Action, ...]
#: One compute action, or two that run as one, or transfers that start together.
Batch = tuple[Action, ...]


def lower(schedule: Schedule, costs: Costs | None = None) -> tuple[Program, ...]:
    """Builds the program of every rank. Neighbouring stages on one rank exchange data in memory,
    without SEND and RECV.

    `costs`, above zero and equal on all ranks, decide the positions of transfers between
    computations: with the costs of the real stages, a transfer does not wait behind a later one.
    Programs end with any costs.

    Raises ScheduleError if the compute orders deadlock.
    """
    #: (time, is compute, rank, action, receive)
    events: list[tuple[float, bool, int, Action, Action | None]] = []
    for rank, spans in enumerate(simulate(schedule, costs).spans):
        for action, start, end in spans:
            events.append((start, True, rank, action, None))
            if (receive := receive_of(schedule, action)) is not None:
                events.append((end, False, rank, action, receive))
    # At the same time transfers come first; otherwise equal events stay in the order of ranks.
    events.sort(key=itemgetter(0, 1))
    programs: list[list[Action]] = [[] for _ in range(schedule.pp)]
    for *_, rank, action, receive in events:
        if receive is None:
            programs[rank].append(action)
        else:
            kind = Kind.SEND_F if action.kind is Kind.F else Kind.SEND_B
            programs[rank].append(Action(kind, action.stage, action.micro_batch))
            programs[schedule.stage_rank[receive.stage]].append(receive)
    return tuple(map(tuple, programs))


def receive_of(schedule: Schedule, action: Action) -> Action | None:
    """The receive of a compute action's result on another rank, or None."""
    kind, stage, micro_batch = action
    if kind is Kind.F and not schedule.is_last(stage):
        target = Action(Kind.RECV_F, stage + 1, micro_batch)
    elif kind in (Kind.B, Kind.I) and not schedule.is_first(stage):
        target = Action(Kind.RECV_B, stage - 1, micro_batch)
    else:
        return None
    return None if schedule.stage_rank[target.stage] == schedule.stage_rank[stage] else target


def peer_of(schedule: Schedule, action: Action) -> int:
    """The pipeline rank on the other end of a SEND or RECV."""
    towards_next = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return schedule.stage_rank[action.stage + (1 if towards_next else -1)]


def other_half(action: Action) -> Action:
    """Returns the RECV of a SEND, and the SEND of a RECV."""
    kind, stage, micro_batch = action
    if kind is Kind.SEND_F:
        return Action(Kind.RECV_F, stage + 1, micro_batch)
    if kind is Kind.RECV_F:
        return Action(Kind.SEND_F, stage - 1, micro_batch)
    if kind is Kind.SEND_B:
        return Action(Kind.RECV_B, stage - 1, micro_batch)
    return Action(Kind.SEND_B, stage + 1, micro_batch)


def lower_to_batches(
    schedule: Schedule, costs: Costs | None = None
) -> tuple[tuple[Batch, ...], ...]:
    """Builds the program of every rank for NCCL, which runs a batch as one kernel and batches in
    order.

    Between computations, a program has batches of the transfers that begin at one moment of the
    simulation. A batch comes after the computations that have ended by then, and before a running
    one: the producers of its data have also ended, so it never waits for anything after it. Raises
    ScheduleError like `lower`.
    """
    spans = simulate(schedule, costs).spans
    #: rank -> time -> transfers that begin then
    starting: list[dict[float, list[Action]]] = [{} for _ in spans]
    for rank, rank_spans in enumerate(spans):
        for action, _, end in rank_spans:
            receive = receive_of(schedule, action)
            if receive is None:
                continue
            peer = schedule.stage_rank[receive.stage]
            starting[rank].setdefault(end, []).append(other_half(receive))
            starting[peer].setdefault(end, []).append(receive)
    return tuple(
        _merged(rank_spans, transfers, costs)
        for rank_spans, transfers in zip(spans, starting, strict=True)
    )


def _merged(
    spans: Sequence[Span],
    transfers: dict[float, list[Action]],
    costs: Costs | None,
) -> tuple[Batch, ...]:
    """Merges the computations of a rank and its batches of transfers, which are given by time."""
    order = [span.action for span in spans]
    ends = {span.action: span.end for span in spans}
    times = deque(sorted(transfers))
    program = list[Batch]()
    for group in groups(order, costs):
        while times and times[0] < ends[group[0]]:
            program.append(tuple(transfers[times.popleft()]))
        program.append(group)
    program += [tuple(transfers[time]) for time in times]
    return tuple(program)


def receive_early(
    program: Program,
    by: int = 2,
    costs: Costs | None = None,
) -> tuple[Batch, ...]:
    """Posts every receive `by` computations earlier, so that transfers overlap with them, and the
    sender finds its receive posted and sends at once. `costs`: those of `lower`. Each transfer is a
    batch of its own.

    Only transports that match messages by tag (gloo) can use it: the transfers of a pair of ranks
    no longer have the same order on both.
    """
    segments: list[list[Batch]] = [[]]  # each computation with its sends
    receives: list[list[Batch]] = [[]]  # posted behind each segment
    for batch in groups(program, costs):
        if batch[0].kind in RECEIVES:
            receives[max(len(segments) - 1 - by, 0)].append(batch)
            continue
        if batch[0].kind in COMPUTE:
            segments.append([])
            receives.append([])
        segments[-1].append(batch)
    program_with_receives = list[Batch]()
    for segment, posted in zip(segments, receives, strict=True):
        program_with_receives += segment
        program_with_receives += posted
    return tuple(program_with_receives)
