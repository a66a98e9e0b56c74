"""Simulates a schedule: start and end of every action, bubble, and peak of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .actions import Action, Kind, ScheduleError
from .schedule import Schedule


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of one micro-batch through one stage; a tuple has one number per model
    stage.

    By default, input and weight gradient cost as much as the forward, and B costs both.
    """

    forward: float | tuple[float, ...] = 1.0
    backward_input: float | tuple[float, ...] = 1.0
    backward_weight: float | tuple[float, ...] = 1.0
    #: seconds between two ranks, from the end of the producer to the start of the consumer
    transfer: float = 0.0
    #: duration of a forward and the next whole backward that run as one (DualPipe's F&B, where each
    #: hides the communication of the other). None: they run one after the other.
    together: float | None = None

    def of(self, kind: Kind, model_stage: int) -> float:
        def pick(cost: float | tuple[float, ...]) -> float:
            return cost[model_stage] if isinstance(cost, tuple) else cost

        if kind is Kind.F:
            return pick(self.forward)
        if kind is Kind.I:
            return pick(self.backward_input)
        if kind is Kind.W:
            return pick(self.backward_weight)
        return pick(self.backward_input) + pick(self.backward_weight)


class Span(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank over time, which counts from the first action of the step."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # rank -> in order of execution
    busy: tuple[float, ...] = field(init=False)  # seconds of work per rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "busy", tuple(map(_busy, self.spans)))

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """The idle time of all ranks over their busy time: (p - 1) / m for AFAB and 1F1B with equal
        stages."""
        total = sum(self.busy)
        return (len(self.spans) * self.makespan - total) / total if total else 0.0


def _busy(spans: tuple[Span, ...]) -> float:
    """Seconds in which an action runs; two actions that run as one count once."""
    latest = total = 0.0
    for _, start, end in spans:
        total += end - max(start, latest)
        latest = end
    return total


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Starts every action as soon as its rank is free and its inputs have arrived.

    Raises ScheduleError if the ranks deadlock, with the action that each waits for.
    """
    costs = costs or Costs()
    duration = _durations(schedule, costs)
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
    waiting: dict[Action, int] = {}  # input that has not ended yet -> rank that waits for it
    ready = list(range(schedule.pp))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        rank_spans = spans[rank]
        free = rank_spans[-1].end if rank_spans else 0.0
        while len(rank_spans) < len(order):
            group = group_at(order, len(rank_spans), costs)
            arrivals = [_arrival(schedule, action, rank, ended, costs.transfer) for action in group]
            missing = next((source for _, source in arrivals if source is not None), None)
            if missing is not None:
                waiting[missing] = rank
                break
            start = max(free, *(arrival for arrival, _ in arrivals))
            seconds = duration[group[0].kind, group[0].stage]
            if len(group) > 1 and costs.together is not None:
                seconds = costs.together
            free = start + seconds
            for action in group:
                rank_spans.append(Span(action, start, free))
                ended[action] = free
                if action in waiting:
                    ready.append(waiting.pop(action))
    _check_finished(schedule, spans, ended)
    return Timeline(schedule, tuple(map(tuple, spans)))


def _durations(schedule: Schedule, costs: Costs) -> dict[tuple[Kind, int], float]:
    return {
        (kind, stage): costs.of(kind, schedule.model_stage(stage))
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        for stage in range(len(schedule.stage_rank))
    }


def _check_finished(
    schedule: Schedule,
    spans: list[list[Span]],
    ended: Mapping[Action, float],
) -> None:
    """Raises ScheduleError with the first blocked action of up to four ranks."""
    stuck = [rank for rank in range(schedule.pp) if len(spans[rank]) < len(schedule.orders[rank])]
    if not stuck:
        return
    blocked = []
    for rank in stuck[:4]:
        action = schedule.orders[rank][len(spans[rank])]
        missing = next(source for source in schedule.needs(action) if source not in ended)
        blocked.append(f"rank {rank} at {action} waits for {missing}")
    raise ScheduleError(f"schedule {schedule.name} deadlocks: {', '.join(blocked)}")


def group_at(
    order: Sequence[Action],
    index: int,
    costs: Costs | None,
) -> tuple[Action, ...]:
    """The action at `index`, with the next action if the two run as one (`Costs.together`): a
    forward, and the whole backward of another stage."""
    first = order[index]
    if costs is None or costs.together is None or index + 1 == len(order):
        return (first,)
    second = order[index + 1]
    is_pair = first.kind is Kind.F and second.kind is Kind.B and first.stage != second.stage
    return (first, second) if is_pair else (first,)


def groups(order: Sequence[Action], costs: Costs | None) -> list[tuple[Action, ...]]:
    """Groups the actions that run as one, in order."""
    action_groups = list[tuple[Action, ...]]()
    index = 0
    while index < len(order):
        action_groups.append(group_at(order, index, costs))
        index += len(action_groups[-1])
    return action_groups


def _arrival(
    schedule: Schedule,
    action: Action,
    rank: int,
    ended: Mapping[Action, float],
    transfer: float,
) -> tuple[float, Action | None]:
    """Returns (when the action's inputs arrive, None), or (0, the first missing input)."""
    latest = 0.0
    for source in schedule.needs(action):
        end = ended.get(source)
        if end is None:
            return 0.0, source
        latest = max(latest, end + (transfer if schedule.stage_rank[source.stage] != rank else 0.0))
    return latest, None


def peak_in_flight(schedule: Schedule, weight_share: float = 1.0) -> tuple[float, ...]:
    """The largest number of stage activations that each rank holds at once, in units of one
    micro-batch through one stage.

    An activation is held from its F to the end of its B or W. `weight_share` is the share that W
    still needs after I (M_W / M_B in arXiv 2401.10241); 1 is the safe bound. With v stages per
    rank, v units correspond to one micro-batch of 1F1B.
    """
    peaks = []
    for order in schedule.orders:
        held = peak = 0.0
        for action in order:
            if action.kind is Kind.F:
                held += 1
                peak = max(peak, held)
            elif action.kind is Kind.B:
                held -= 1
            elif action.kind is Kind.I:
                held -= 1 - weight_share
            else:
                held -= weight_share
        peaks.append(peak)
    return tuple(peaks)


def peak_inputs(schedule: Schedule, rank: int, inputs_of_stage: Mapping[int, int]) -> int:
    """The largest number of inputs that a rank holds at once, if each forward of model stage `s`
    stores `inputs_of_stage[s]` of them and the backward of the same micro-batch frees them."""
    held = 0
    peak = 0
    for action in schedule.orders[rank]:
        count = inputs_of_stage[schedule.model_stage(action.stage)]
        if action.kind is Kind.F:
            held += count
            peak = max(peak, held)
        elif action.kind is not Kind.W:
            held -= count
    return peak
