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

_SPINNING_LOAD = 0.3  # CPU seconds a second: computing, not waiting
# without a progress report, in a run that hangs: its last report no longer says where it is
_MUTE_S = 5.0
_MIN_EXCESS_S = 0.005  # of compute time above the peers', to be a straggler
_MIN_EXCESS_SHARE = 0.1  # of the step that a straggler must cost the others


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


def diagnose(plan: Plan, workers: Collection[WorkerStatus], rules: Policy) -> Diagnosis | None:
    """What is wrong, None for nothing. `seen`: the status of the ranks that are alive."""
    frozen = [worker for worker in workers if worker.is_frozen]
    if frozen:
        suspect = max(frozen, key=lambda worker: (worker.stopped_s, -worker.rank))
        behavior = f"stopped by a signal (state T) for {suspect.stopped_s:g} s"
        return _rank_diagnosis("worker_frozen", plan, suspect, workers, behavior)
    silences_s = {worker.rank: worker.silent_s for worker in workers if worker.silent_s is not None}
    watched = [worker for worker in workers if worker.rank in silences_s]
    if (
        not watched
        or len(watched) < len(workers)
        or min(worker.step_s for worker in watched) < hang_timeout_s(watched, rules)
    ):
        return None
    not_waiting = [
        worker for worker in watched if worker.waiting is None or silences_s[worker.rank] > _MUTE_S
    ]
    if not not_waiting:
        return _network_diagnosis(watched)
    suspect = min(not_waiting, key=lambda worker: (worker.step, -worker.still_s, worker.rank))
    if suspect.busy >= _SPINNING_LOAD or suspect.state == "R":  # a busy machine may give it little
        behavior = f"it computes ({suspect.busy:.0%} of a core), and does not get on for {suspect.still_s:g} s"
        return _rank_diagnosis("worker_spinning", plan, suspect, workers, behavior)
    mute = silences_s[suspect.rank] > _MUTE_S
    idleness = (
        f"without a progress report for {suspect.silent_s:g} s"
        if mute
        else "neither computing nor waiting"
    )
    behavior = f"{idleness}, state {suspect.state}, for {suspect.still_s:g} s"
    return _rank_diagnosis("worker_stuck", plan, suspect, workers, behavior)


def hang_timeout_s(watched: Collection[WorkerStatus], rules: Policy) -> float:
    """Seconds that may pass without a step of any rank before something is wrong."""
    step_times_s = [worker.usual_step_s for worker in watched if worker.usual_step_s is not None]
    if len(step_times_s) < len(watched) or any(
        worker.phase in ("start", "checkpoint") for worker in watched
    ):
        return max(rules.start_hang_after_s, rules.hang_after_s)
    return max(rules.hang_after_s, rules.hang_after_steps * statistics.median(step_times_s))


def slowdown(
    plan: Plan,
    workers: Collection[WorkerStatus],
    peer_medians_s: Mapping[tuple[str, int], float],
    least_ratio: float,
) -> float | None:
    """Own compute time of a node's slowest rank over the median of its `peers`; None if it is not a
    straggler.

    Own time has no time spent in waiting for others, so ranks that a straggler holds up are not
    stragglers.
    """
    ratios = []
    for worker in filter(_is_timed, workers):
        rank = plan.ranks[worker.rank]
        own_s = _scaled_own_s(plan, worker)
        usual_s = peer_medians_s.get((rank.node, rank.coord.pp), 0.0)
        excess_s = own_s - usual_s
        if (
            usual_s > 0
            and excess_s > max(_MIN_EXCESS_S, _MIN_EXCESS_SHARE * (worker.usual_step_s or 0.0))
            and own_s / usual_s >= least_ratio
        ):
            ratios.append(round(own_s / usual_s, 2))
    return max(ratios, default=None)


def peer_medians_s(plan: Plan, workers: Collection[WorkerStatus]) -> dict[tuple[str, int], float]:
    """(node, stage) -> median of own compute time of that stage's ranks on other nodes, seconds.

    One sort per stage, in which a node's own ranks are stepped over, since there may be 16,384
    ranks.
    """
    times_by_stage: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for worker in filter(_is_timed, workers):
        times_by_stage[plan.ranks[worker.rank].coord.pp].append(
            (_scaled_own_s(plan, worker), plan.ranks[worker.rank].node)
        )
    medians: dict[tuple[str, int], float] = {}
    for stage, times in times_by_stage.items():
        times.sort()
        indices_by_node: dict[str, list[int]] = defaultdict(list)
        for index, (_, node) in enumerate(times):
            indices_by_node[node].append(index)
        for node, node_indices in indices_by_node.items():
            peer_count = len(times) - len(node_indices)
            if peer_count:
                low, high = (
                    times[_index_outside(node_indices, position)][0]
                    for position in ((peer_count - 1) // 2, peer_count // 2)
                )
                medians[node, stage] = (low + high) / 2
    return medians


def _index_outside(excluded: Collection[int], position: int) -> int:
    """The index of the `at`-th element that is not in `left_out`, which is sorted."""
    for index in excluded:
        position += index <= position
    return position


def _is_timed(worker: WorkerStatus) -> bool:
    return worker.usual_own_s is not None and bool(worker.usual_step_s)


def _scaled_own_s(plan: Plan, worker: WorkerStatus) -> float:
    """Own time of a rank, seconds, scaled to the largest number of micro-batches that any replica
    computes."""
    parallel = plan.parallel
    assert worker.usual_own_s is not None
    if plan.program:  # nobody knows of batches
        return worker.usual_own_s
    return (
        worker.usual_own_s
        * parallel.micro_batches
        / computed(parallel, replica_of(parallel, plan.ranks[worker.rank].coord))
    )


def _rank_diagnosis(
    kind: str, plan: Plan, worker: WorkerStatus, workers: Collection[WorkerStatus], behavior: str
) -> Diagnosis:
    rank = plan.ranks[worker.rank]
    waiting_peers = Counter(
        peer.waiting for peer in workers if peer.rank != worker.rank and peer.waiting
    )
    missed_collective = (
        f"did not enter {waiting_peers.most_common(1)[0][0]}"
        if waiting_peers and not worker.waiting
        else None
    )
    phase = f"in {worker.phase}" if worker.phase not in ("", "start", "step") else "at work"
    location = f"rank {worker.rank} on {rank.node} (gpu {rank.gpu})"
    if not worker.step:
        situation = "had not begun to train"
    else:
        situation = f"{missed_collective or f'is {phase}'} of step {worker.step}" + (
            f", {phase}" if missed_collective and phase != "at work" else ""
        )
    return Diagnosis(
        kind,
        f"{location} {situation}: {behavior}",
        worker.rank,
        rank.node,
        worker.step - 1 if worker.step else None,
    )


def _network_diagnosis(watched: Collection[WorkerStatus]) -> Diagnosis:
    ranks_by_collective: dict[str, list[int]] = {}
    for worker in sorted(watched, key=lambda worker: worker.rank):
        ranks_by_collective.setdefault(f"{worker.waiting} of step {worker.step}", []).append(
            worker.rank
        )
    waiting_ranks = "; ".join(
        f"{_listed_ranks(ranks)} in {collective}"
        for collective, ranks in list(ranks_by_collective.items())[:4]
    )
    still_s = min(worker.still_s for worker in watched)
    step = min(worker.step for worker in watched)
    text = (
        f"every rank waits for another for {still_s:g} s ({waiting_ranks}): none is missing, what carries the"
        " exchange is"
    )
    return Diagnosis("collective_hung", text, step=step - 1 if step else None)


def _listed_ranks(ranks: list[int]) -> str:
    first_ranks = ", ".join(map(str, ranks[:8]))
    return f"rank {first_ranks}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def reported_workers(
    workers_by_node: Mapping[str, Collection[WorkerStatus]], plan: Plan
) -> list[WorkerStatus]:
    """The status of all ranks, each as reported by the agent of its node."""
    return [
        worker
        for node, workers in workers_by_node.items()
        for worker in workers
        if _runs_on(plan, worker.rank, node)
    ]


def _runs_on(plan: Plan, rank: int, node: str) -> bool:
    return 0 <= rank < len(plan.ranks) and plan.ranks[rank].node == node
