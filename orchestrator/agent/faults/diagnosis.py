"""Who holds a run up: from what is seen of all its ranks, the one at fault. Pure.

In synchronous training one rank that does not get on stops all: the others stand in an exchange that it has not
entered. So when no rank has made a step for too long, the culprit is the one that waits for nobody; how it spends its
time says what is wrong with it. If every rank waits, nobody is missing, and what carries the exchange is at fault.
A worker that is stopped by a signal needs no comparison: the kernel says so.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan import Plan
from orchestrator.plan.batch import computed, replica_of
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Policy
from orchestrator.run.state import Cause

_SPINS = 0.3  # CPU seconds a second: computing, not waiting
_MUTE_S = 5.0  # without a pulse, in a run that stands still: what it said last is no longer where it is
_LEAST_S = 0.005  # of compute time above the peers', to be called slow
_SHARE = 0.1  # of the step that a slow rank must cost the others


@dataclass(frozen=True)
class Diagnosis:
    """`kind`: of `launch.state.WORKER_CAUSES`. Rank and node are None where nobody's own fault is seen."""

    kind: str
    text: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None  # the last one that was completed

    def cause(self, folder: RunFolder, epoch: int) -> Cause:
        """The cause of the epoch's end that it makes, with the paths of the worker's log and stack."""
        files = {}
        if self.rank is not None:
            paths = {"log": folder.rank_log(self.rank), "stack": folder.stack(epoch, self.rank)}
            files = {name: str(path.relative_to(folder.path)) for name, path in paths.items()}
        about = {"node": self.node, "rank": self.rank, "step": self.step}
        return Cause(kind=self.kind, text=self.text, epoch=epoch, **about, **files)


def diagnose(plan: Plan, seen: Collection[WorkerStatus], rules: Policy) -> Diagnosis | None:
    """`seen`: the ranks that live. None while nothing is wrong."""
    frozen = [one for one in seen if one.is_frozen]
    if frozen:
        first = max(frozen, key=lambda one: (one.stopped_s, -one.rank))
        how = f"stopped by a signal (state T) for {first.stopped_s:g} s"
        return _diagnosis("worker_frozen", plan, first, seen, how)
    watched = [one for one in seen if one.silent_s is not None]
    if not watched or len(watched) < len(seen) or min(one.step_s for one in watched) < hang_timeout_s(watched, rules):
        return None
    free = [one for one in watched if one.waiting is None or one.silent_s > _MUTE_S]
    if not free:
        return _nobody(watched)
    first = min(free, key=lambda one: (one.step, -one.still_s, one.rank))
    if first.busy >= _SPINS or first.state == "R":  # a busy machine may give it little
        how = f"it computes ({first.busy:.0%} of a core), and does not get on for {first.still_s:g} s"
        return _diagnosis("worker_spinning", plan, first, seen, how)
    held = f"without a pulse for {first.silent_s:g} s" if first.silent_s > _MUTE_S else "neither computing nor waiting"
    how = f"{held}, state {first.state}, for {first.still_s:g} s"
    return _diagnosis("worker_stuck", plan, first, seen, how)


def hang_timeout_s(watched: Collection[WorkerStatus], rules: Policy) -> float:
    """How long no rank may make a step before something is wrong, seconds."""
    usual = [one.usual_step_s for one in watched if one.usual_step_s is not None]
    if len(usual) < len(watched) or any(one.phase in ("start", "checkpoint") for one in watched):
        return max(rules.start_hang_after_s, rules.hang_after_s)
    return max(rules.hang_after_s, rules.hang_after_steps * statistics.median(usual))


def slowdown(
    plan: Plan, theirs: Collection[WorkerStatus], peers: Mapping[tuple[str, int], float], least_ratio: float
) -> float | None:
    """Of one node: own compute time of its slowest rank over what is usual for its `peers`; None: it is not slow.

    Time spent in waiting for others is in nobody's own time, so those whom a slow rank holds up are not slow.
    """
    found = []
    for one in filter(_is_timed, theirs):
        place, own = plan.ranks[one.rank], _of_the_most(plan, one)
        usual = peers.get((place.node, place.coord.pp), 0.0)
        more = own - usual
        if usual > 0 and more > max(_LEAST_S, _SHARE * one.usual_step_s) and own / usual >= least_ratio:
            found.append(round(own / usual, 2))
    return max(found, default=None)


def peers_usual(plan: Plan, seen: Collection[WorkerStatus]) -> dict[tuple[str, int], float]:
    """(node, stage) -> median of own compute time of that stage's ranks on other nodes, seconds.

    One sort a stage: a node's own ranks are stepped over where they stand in the order, for there may be 16,384 ranks.
    """
    stages: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for one in filter(_is_timed, seen):
        stages[plan.ranks[one.rank].coord.pp].append((_of_the_most(plan, one), plan.ranks[one.rank].node))
    found: dict[tuple[str, int], float] = {}
    for stage, order in stages.items():
        order.sort()
        places: dict[str, list[int]] = defaultdict(list)
        for place, (_, node) in enumerate(order):
            places[node].append(place)
        for node, own in places.items():
            others = len(order) - len(own)
            if others:
                low, high = (order[_without(own, at)][0] for at in ((others - 1) // 2, others // 2))
                found[node, stage] = (low + high) / 2
    return found


def _without(left_out: Collection[int], at: int) -> int:
    """The place of the `at`-th of those that stay; `left_out` rises."""
    for place in left_out:
        at += place <= at
    return at


def _is_timed(one: WorkerStatus) -> bool:
    return one.usual_own_s is not None and bool(one.usual_step_s)


def _of_the_most(plan: Plan, one: WorkerStatus) -> float:
    """A rank's own time as it would be with the most micro-batches that a replica computes: who takes more is not
    slow."""
    par = plan.parallel
    return one.usual_own_s * par.micro_batches / computed(par, replica_of(par, plan.ranks[one.rank].coord))


def _diagnosis(kind: str, plan: Plan, one: WorkerStatus, seen: Collection[WorkerStatus], how: str) -> Diagnosis:
    place = plan.ranks[one.rank]
    others = Counter(other.waiting for other in seen if other.rank != one.rank and other.waiting)
    waits = f"did not enter {others.most_common(1)[0][0]}" if others and not one.waiting else None
    phase = f"in {one.phase}" if one.phase not in ("", "start", "step") else "at work"
    where = f"rank {one.rank} on {place.node} (gpu {place.gpu})"
    if not one.step:
        did = "had not begun to train"
    else:
        did = f"{waits or f'is {phase}'} of step {one.step}" + (f", {phase}" if waits and phase != "at work" else "")
    return Diagnosis(kind, f"{where} {did}: {how}", one.rank, place.node, one.step - 1 if one.step else None)


def _nobody(watched: Collection[WorkerStatus]) -> Diagnosis:
    by_place: dict[str, list[int]] = {}
    for one in sorted(watched, key=lambda one: one.rank):
        by_place.setdefault(f"{one.waiting} of step {one.step}", []).append(one.rank)
    where = "; ".join(f"{_ranks(ranks)} in {place}" for place, ranks in list(by_place.items())[:4])
    still, step = min(one.still_s for one in watched), min(one.step for one in watched)
    text = f"every rank waits for another for {still:g} s ({where}): none is missing, what carries the exchange is"
    return Diagnosis("collective_hung", text, step=step - 1 if step else None)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def gathered(by_node: Mapping[str, Collection[WorkerStatus]], plan: Plan) -> list[WorkerStatus]:
    """What the agents have seen last, of ranks that are theirs."""
    return [one for node, seen in by_node.items() for one in seen if _is_of(plan, one.rank, node)]


def _is_of(plan: Plan, rank: int, node: str) -> bool:
    return 0 <= rank < len(plan.ranks) and plan.ranks[rank].node == node
