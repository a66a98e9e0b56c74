"""Checks that a schedule or a lowered program is complete, legal and free of deadlocks."""

from __future__ import annotations

from collections import Counter, deque

from .actions import COMPUTE, RECEIVES, Action, Kind, ScheduleError
from .lower import Program, other_half, peer_of, receive_of
from .schedule import Schedule
from .simulate import peak_in_flight, simulate


def problem(schedule: Schedule, max_in_flight: float | None = None) -> str | None:
    """Finds the first problem of a schedule's compute orders. Returns one line, or None.

    Every micro-batch must pass each stage of its route exactly once forward and once backward (B,
    or I then W), on the rank that holds the stage. The ranks must finish, and no rank may hold more
    than `max_in_flight` stage activations.
    """
    counts: Counter[Action] = Counter()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind not in COMPUTE:
                return f"{_at(schedule, rank)}: {action} is not one of F, B, I, W"
            if not 0 <= action.micro_batch < schedule.micro_batches:
                return (
                    f"{_at(schedule, rank)}: {action}, but micro-batches are 0 to"
                    f" {schedule.micro_batches - 1}"
                )
            if action.stage not in schedule.route(action.micro_batch):
                return (
                    f"{_at(schedule, rank)}: {action}, but that micro-batch does not pass that"
                    " stage"
                )
            if schedule.stage_rank[action.stage] != rank:
                return (
                    f"{_at(schedule, rank)}: {action}, but the stage is on rank"
                    f" {schedule.stage_rank[action.stage]}"
                )
            counts[action] += 1
            if counts[action] > 1:
                return f"{_at(schedule, rank)}: {action} happens twice"
    for micro_batch in range(schedule.micro_batches):
        for stage in schedule.route(micro_batch):
            backwards, input_backwards, weight_backwards = (
                counts[Action(kind, stage, micro_batch)] for kind in (Kind.B, Kind.I, Kind.W)
            )
            subject = f"schedule {schedule.name}: micro-batch {micro_batch} of stage {stage}"
            if not counts[Action(Kind.F, stage, micro_batch)]:
                return f"{subject} has no forward"
            if (backwards, input_backwards, weight_backwards) not in ((1, 0, 0), (0, 1, 1)):
                return (
                    f"{subject} wants B, or I and W; has {backwards} B, {input_backwards} I,"
                    f" {weight_backwards} W"
                )
    try:
        simulate(schedule)
    except ScheduleError as error:
        return str(error)
    if max_in_flight is not None:
        for rank, peak in enumerate(peak_in_flight(schedule)):
            if peak > max_in_flight:
                return (
                    f"{_at(schedule, rank)} holds {peak:g} stage activations at once, the bound is"
                    f" {max_in_flight:g}"
                )
    return None


def program_problem(
    schedule: Schedule,
    programs: tuple[Program, ...],
    rendezvous: bool = True,
) -> str | None:
    """Finds the first problem of lowered programs. Returns one line, or None.

    Each result that another rank needs must be sent once and received once, before its use. With
    `rendezvous`, every send and receive blocks until its other half runs, so two ranks must list
    their mutual transfers in the same order. Without it, a receive waits only when its data is
    used, and a send waits until the receive of the same message is posted.
    """
    for rank, program in enumerate(programs):
        if tuple(action for action in program if action.kind in COMPUTE) != schedule.orders[rank]:
            return f"{_at(schedule, rank)}: the program computes in another order than the schedule"
    expected = {
        receive
        for order in schedule.orders
        for action in order
        if (receive := receive_of(schedule, action))
    }
    received = Counter(
        action for program in programs for action in program if action.kind in RECEIVES
    )
    if received != Counter(expected):
        wrong = next(iter((received - Counter(expected)) or (Counter(expected) - received)))
        return (
            f"schedule {schedule.name}: {wrong} happens {received[wrong]} times, want"
            f" {int(wrong in expected)}"
        )
    return _run(schedule, programs, rendezvous)


def _run(schedule: Schedule, programs: tuple[Program, ...], rendezvous: bool) -> str | None:
    """Simulates the programs, with sends and receives as `rendezvous` defines them."""
    heads = [0] * schedule.pp
    done: set[Action] = set()
    arrived: set[Action] = set()
    posted: set[Action] = set()
    todo = deque(range(schedule.pp))
    while todo:
        rank = todo.popleft()
        program = programs[rank]
        while heads[rank] < len(program):
            action = program[heads[rank]]
            if action.kind in COMPUTE:
                if not _ready(schedule, action, rank, done, arrived):
                    break
                done.add(action)
            elif rendezvous:
                peer = peer_of(schedule, action)
                peer_action = (
                    programs[peer][heads[peer]] if heads[peer] < len(programs[peer]) else None
                )
                if peer_action != other_half(action):
                    break
                arrived.add(action if action.kind in RECEIVES else peer_action)
                heads[peer] += 1
                todo.append(peer)
            elif action.kind in RECEIVES:
                posted.add(action)
                todo.append(peer_of(schedule, action))
            elif (receive := other_half(action)) in posted:
                arrived.add(receive)
                todo.append(peer_of(schedule, action))
            else:
                break
            heads[rank] += 1
    stuck = [rank for rank in range(schedule.pp) if heads[rank] < len(programs[rank])]
    if not stuck:
        return None
    where = ", ".join(f"rank {rank} at {programs[rank][heads[rank]]}" for rank in stuck[:4])
    return f"schedule {schedule.name} deadlocks: {where}"


def _ready(
    schedule: Schedule,
    action: Action,
    rank: int,
    done: set[Action],
    arrived: set[Action],
) -> bool:
    for source in schedule.needs(action):
        if schedule.stage_rank[source.stage] == rank:
            if source not in done:
                return False
        elif receive_of(schedule, source) not in arrived:
            return False
    return True


def _at(schedule: Schedule, rank: int) -> str:
    return f"schedule {schedule.name}, rank {rank}"
