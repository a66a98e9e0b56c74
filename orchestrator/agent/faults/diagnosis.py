"""Finds the rank at fault when a run hangs, from the status of all its ranks. Pure.

In synchronous training one rank that does not advance stops all others: they wait in a collective
that it has not entered. So if no rank has completed a step for too long, the one at fault is the
one that waits for nobody; how it spends its time says what is wrong with it. If every rank waits,
none is missing, and the network is at fault. A worker that is stopped by a signal needs no
comparison: the kernel says so.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import structs

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan import Plan
from orchestrator.plan.batch import computed, replica_of
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Policy
from orchestrator.run.state import Cause

_SPINS = 0.3  # CPU seconds a second: computing, not waiting
# without a progress report, in a run that hangs: its last report no longer says where it is
_MUTE_S = 5.0
_LEAST_S = 0.005  # of compute time above the peers', to be a straggler
_SHARE = 0.1  # of the step that a straggler must cost the others


@dataclass(frozen=True)
class Diagnosis:
    """`kind`: of `launch.state.WORKER_CAUSES`. Rank and node are None where nobody's own fault is
    seen."""

    kind: str
    text: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None  # the last one that was completed

    def cause(self, folder: RunFolder, epoch: int) -> Cause:
        """The cause of the epoch's end that it makes, with the paths of the worker's log and
        stack."""
        cause = Cause(
            kind=self.kind,
            text=self.text,
            epoch=epoch,
            node=self.node,
            rank=self.rank,
            step=self.step,
        )
        if self.rank is None:
            return cause
        log = folder.rank_log(self.rank)
        stack = folder.stack(epoch, self.rank)
        return structs.replace(
            cause, log=str(log.relative_to(folder.path)), stack=str(stack.relative_to(folder.path))
        )


def diagnose(plan: Plan, seen: Collection[WorkerStatus], rules: Policy) -> Diagnosis | None:
    """What is wrong, None for nothing. `seen`: the status of the ranks that are alive."""
    frozen = [one for one in seen if one.is_frozen]
    if frozen:
        first = max(frozen, key=lambda one: (one.stopped_s, -one.rank))
        how = f"stopped by a signal (state T) for {first.stopped_s:g} s"
        return _diagnosis("worker_frozen", plan, first, seen, how)
    silent = {one.rank: one.silent_s for one in seen if one.silent_s is not None}
    watched = [one for one in seen if one.rank in silent]
    if (
        not watched
        or len(watched) < len(seen)
        or min(one.step_s for one in watched) < hang_timeout_s(watched, rules)
    ):
        return None
    free = [one for one in watched if one.waiting is None or silent[one.rank] > _MUTE_S]
    if not free:
        return _nobody(watched)
    first = min(free, key=lambda one: (one.step, -one.still_s, one.rank))
    if first.busy >= _SPINS or first.state == "R":  # a busy machine may give it little
        how = (
            f"it computes ({first.busy:.0%} of a core), and does not get on for {first.still_s:g} s"
        )
        return _diagnosis("worker_spinning", plan, first, seen, how)
    mute = silent[first.rank] > _MUTE_S
    held = (
        f"without a progress report for {first.silent_s:g} s"
        if mute
        else "neither computing nor waiting"
    )
    how = f"{held}, state {first.state}, for {first.still_s:g} s"
    return _diagnosis("worker_stuck", plan, first, seen, how)


def hang_timeout_s(watched: Collection[WorkerStatus], rules: Policy) -> float:
    """Seconds that may pass without a step of any rank before something is wrong."""
    usual = [one.usual_step_s for one in watched if one.usual_step_s is not None]
    if len(usual) < len(watched) or any(one.phase in ("start", "checkpoint") for one in watched):
        return max(rules.start_hang_after_s, rules.hang_after_s)
    return max(rules.hang_after_s, rules.hang_after_steps * statistics.median(usual))


def slowdown(
    plan: Plan,
    theirs: Collection[WorkerStatus],
    peers: Mapping[tuple[str, int], float],
    least_ratio: float,
) -> float | None:
    """Own compute time of a node's slowest rank over the median of its `peers`; None if it is not a
    straggler.

    Own time has no time spent in waiting for others, so ranks that a straggler holds up are not
    stragglers.
    """
    found = []
    for one in filter(_is_timed, theirs):
        place = plan.ranks[one.rank]
        own = _of_the_most(plan, one)
        usual = peers.get((place.node, place.coord.pp), 0.0)
        more = own - usual
        if (
            usual > 0
            and more > max(_LEAST_S, _SHARE * (one.usual_step_s or 0.0))
            and own / usual >= least_ratio
        ):
            found.append(round(own / usual, 2))
    return max(found, default=None)


def peers_usual(plan: Plan, seen: Collection[WorkerStatus]) -> dict[tuple[str, int], float]:
    """(node, stage) -> median of own compute time of that stage's ranks on other nodes, seconds.

    One sort per stage, in which a node's own ranks are stepped over, since there may be 16,384
    ranks.
    """
    stages: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for one in filter(_is_timed, seen):
        stages[plan.ranks[one.rank].coord.pp].append(
            (_of_the_most(plan, one), plan.ranks[one.rank].node)
        )
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
    """The index of the `at`-th element that is not in `left_out`, which is sorted."""
    for place in left_out:
        at += place <= at
    return at


def _is_timed(one: WorkerStatus) -> bool:
    return one.usual_own_s is not None and bool(one.usual_step_s)


def _of_the_most(plan: Plan, one: WorkerStatus) -> float:
    """Own time of a rank, seconds, scaled to the largest number of micro-batches that any replica
    computes."""
    par = plan.parallel
    assert one.usual_own_s is not None
    if plan.program:  # nobody knows of batches
        return one.usual_own_s
    return (
        one.usual_own_s
        * par.micro_batches
        / computed(par, replica_of(par, plan.ranks[one.rank].coord))
    )


def _diagnosis(
    kind: str, plan: Plan, one: WorkerStatus, seen: Collection[WorkerStatus], how: str
) -> Diagnosis:
    place = plan.ranks[one.rank]
    others = Counter(other.waiting for other in seen if other.rank != one.rank and other.waiting)
    waits = f"did not enter {others.most_common(1)[0][0]}" if others and not one.waiting else None
    phase = f"in {one.phase}" if one.phase not in ("", "start", "step") else "at work"
    where = f"rank {one.rank} on {place.node} (gpu {place.gpu})"
    if not one.step:
        did = "had not begun to train"
    else:
        did = f"{waits or f'is {phase}'} of step {one.step}" + (
            f", {phase}" if waits and phase != "at work" else ""
        )
    return Diagnosis(
        kind, f"{where} {did}: {how}", one.rank, place.node, one.step - 1 if one.step else None
    )


def _nobody(watched: Collection[WorkerStatus]) -> Diagnosis:
    by_place: dict[str, list[int]] = {}
    for one in sorted(watched, key=lambda one: one.rank):
        by_place.setdefault(f"{one.waiting} of step {one.step}", []).append(one.rank)
    where = "; ".join(f"{_ranks(ranks)} in {place}" for place, ranks in list(by_place.items())[:4])
    still = min(one.still_s for one in watched)
    step = min(one.step for one in watched)
    text = (
        f"every rank waits for another for {still:g} s ({where}): none is missing, what carries the"
        " exchange is"
    )
    return Diagnosis("collective_hung", text, step=step - 1 if step else None)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def gathered(by_node: Mapping[str, Collection[WorkerStatus]], plan: Plan) -> list[WorkerStatus]:
    """The status of all ranks, each as reported by the agent of its node."""
    return [one for node, seen in by_node.items() for one in seen if _is_of(plan, one.rank, node)]


def _is_of(plan: Plan, rank: int, node: str) -> bool:
    return 0 <= rank < len(plan.ranks) and plan.ranks[rank].node == node
