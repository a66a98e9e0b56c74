"""From compute orders to full programs: sends and receives in an order that cannot deadlock.

Both halves of a transfer are placed at one moment of one global order: when the producer ends, in a
simulation with the stages' costs. Every rank's program is a sub-sequence of that order, so the
programs finish even if each send blocks until its receive runs (rendezvous), and any two ranks name
their mutual transfers in the same order, which NCCL asks for.
"""

from __future__ import annotations

from operator import itemgetter

from .actions import COMPUTE, RECEIVES, Action, Kind
from .schedule import Schedule
from .simulate import Costs, groups, simulate

Program = tuple[Action, ...]
#: One compute action, or two that run as one, or transfers that start together.
Batch = tuple[Action, ...]


def lower(schedule: Schedule, costs: Costs | None = None) -> tuple[Program, ...]:
    """Program of every rank. Neighbouring stages on one rank hand over in memory, without SEND and
    RECV.

    `costs`, above zero and equal on all ranks, decide where transfers stand between computations:
    with those of the real stages a transfer does not wait behind one that comes later. Any costs
    give programs that end.

    Raises ScheduleError if the compute orders deadlock.
    """
    events: list[
        tuple[float, bool, int, Action, Action | None]
    ] = []  # (time, is compute, rank, action, receive)
    for rank, spans in enumerate(simulate(schedule, costs).spans):
        for action, start, end in spans:
            events.append((start, True, rank, action, None))
            if (receive := receive_of(schedule, action)) is not None:
                events.append((end, False, rank, action, receive))
    events.sort(
        key=itemgetter(0, 1)
    )  # at one time transfers come first; what is still equal stays in order of rank
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
    """The receive on another rank that a compute action's result goes to, if there is one."""
    kind, stage, micro_batch = action
    if kind is Kind.F and not schedule.is_last(stage):
        target = Action(Kind.RECV_F, stage + 1, micro_batch)
    elif kind in (Kind.B, Kind.I) and not schedule.is_first(stage):
        target = Action(Kind.RECV_B, stage - 1, micro_batch)
    else:
        return None
    return None if schedule.stage_rank[target.stage] == schedule.stage_rank[stage] else target


def peer_of(schedule: Schedule, action: Action) -> int:
    """Pipeline rank on the other end of a SEND or RECV."""
    towards_next = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return schedule.stage_rank[action.stage + (1 if towards_next else -1)]


def other_half(action: Action) -> Action:
    """SEND -> its RECV and RECV -> its SEND."""
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
    """Program of every rank for NCCL, which runs a batch as one kernel and batches in order:
    computations, and between them batches of the transfers that begin at one moment of the
    simulation.

    A batch stands behind the computations that have ended by then, and before one that is running:
    whatever its data needs has ended too, so nothing that it waits for comes after it. Raises
    ScheduleError as `lower`.
    """
    spans = simulate(schedule, costs).spans
    starting: list[dict[float, list[Action]]] = [{} for _ in spans]
    for rank, rank_spans in enumerate(spans):
        for action, _, end in rank_spans:
            if (receive := receive_of(schedule, action)) is not None:
                starting[rank].setdefault(end, []).append(other_half(receive))
                starting[schedule.stage_rank[receive.stage]].setdefault(end, []).append(receive)
    programs = []
    for rank_spans, batches in zip(spans, starting, strict=True):
        times = sorted(batches, reverse=True)
        program = list[Batch]()
        ends = {action: end for action, _, end in rank_spans}
        for group in groups([action for action, _, _ in rank_spans], costs):
            while times and times[-1] < ends[group[0]]:
                program.append(tuple(batches[times.pop()]))
            program.append(group)
        programs.append((*program, *(tuple(batches[time]) for time in reversed(times))))
    return tuple(programs)


def receive_early(program: Program, by: int = 2, costs: Costs | None = None) -> tuple[Batch, ...]:
    """Post every receive `by` computations earlier: the transfer then overlaps with them, and the
    sender, who finds its receive posted, sends at once instead of asking first. `costs`: those of
    `lower`; each transfer stands alone.

    Only for transports that match messages by tag (gloo): it gives up the common order of a pair's
    transfers.
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
    return tuple(
        batch
        for pair in zip(segments, receives, strict=True)
        for batches in pair
        for batch in batches
    )
