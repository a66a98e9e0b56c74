"""Finds the rank at fault when a run hangs, from the status of all its ranks. Pure.

In synchronous training, one rank that makes no progress stops all others: they wait in a collective
that it has not entered. So if no rank has completed a step for too long, the rank at fault is the
one that does not wait; how it spends its time tells the kind of its fault. If every rank waits,
none is missing, and the network is at fault. A worker that a signal has stopped needs no
comparison: the kernel reports it.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan import Plan
from orchestrator.plan.batch import computed, replica_of
from orchestrator.plan.worker import SLOW_PHASES
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Policy
from orchestrator.run.state import Cause

_SPINNING_LOAD = 0.3  # CPU seconds per second from which a worker computes and does not wait
#: Seconds without a progress report after which a worker's last report is out of date.
_MUTE_S = 5.0
#: A straggler's own compute time exceeds its peers' by this many seconds and by this share of a
#: step.
_MIN_EXCESS_S = 0.005
_MIN_EXCESS_SHARE = 0.1


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a hang. `kind` is one of `run.state.WORKER_CAUSES`.

    `rank` and `node` are None if no single rank is at fault.
    """

    kind: str
    text: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None  # the last completed step

    def cause(self, folder: RunFolder, epoch: int) -> Cause:
        """Returns the cause of the epoch's end, with the paths of the worker's log and stack."""
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
            cause,
            log=str(log.relative_to(folder.path)),
            stack=str(stack.relative_to(folder.path)),
        )


def diagnose(
    plan: Plan,
    workers: Collection[WorkerStatus],
    rules: Policy,
    ended_ranks: Sequence[int] = (),
) -> Diagnosis | None:
    """Returns the diagnosis of a hang, or None. `workers` are the statuses of living ranks,
    `ended_ranks` have ended without an error."""
    frozen = [worker for worker in workers if worker.is_frozen]
    if frozen:
        suspect = max(frozen, key=lambda worker: (worker.stopped_s, -worker.rank))
        behavior = f"stopped by a signal (state T) for {suspect.stopped_s:g} s"
        return _rank_diagnosis("worker_frozen", plan, suspect, workers, behavior)
    unheard = [worker for worker in workers if worker.silent_s is None]
    if len(unheard) == len(workers) or (unheard and not plan.program):
        return None
    timeout_s = hang_timeout_s(workers, rules)
    if ended_ranks:  # the others may save the result
        timeout_s = max(timeout_s, rules.start_hang_after_s)
    if min(worker.step_s for worker in workers) < timeout_s:
        return None
    if min(worker.still_s for worker in workers) < _phase_limit_s(workers):
        return None
    stepless_ranks = _ranks_without_steps(workers) if plan.program else []
    if ended_ranks or stepless_ranks:
        return _unattributed_diagnosis(workers, ended_ranks, stepless_ranks)
    not_waiting = [worker for worker in workers if not _waits(worker, plan)]
    if not not_waiting:
        return _network_diagnosis(workers)
    suspect = min(not_waiting, key=_innocence)
    # On a busy machine a worker that computes may get little of a core.
    if suspect.busy >= _SPINNING_LOAD or suspect.state == "R":
        behavior = (
            f"it computes ({suspect.busy:.0%} of a core) without progress for {suspect.still_s:g} s"
        )
        return _rank_diagnosis("worker_spinning", plan, suspect, workers, behavior)
    idleness = "neither computing nor waiting"
    if _is_mute(suspect):
        idleness = f"without a progress report for {suspect.silent_s:g} s"
    behavior = f"{idleness}, state {suspect.state}, for {suspect.still_s:g} s"
    return _rank_diagnosis("worker_stuck", plan, suspect, workers, behavior)


def _ranks_without_steps(workers: Collection[WorkerStatus]) -> list[int]:
    """Returns the ranks of a program that report no steps although others may, as where one rank
    reports for all. Their progress cannot be compared."""
    any_steps = any(worker.usual_step_s is not None for worker in workers)
    return sorted(
        worker.rank
        for worker in workers
        if worker.silent_s is None or (any_steps and worker.usual_step_s is None)
    )


def _unattributed_diagnosis(
    workers: Collection[WorkerStatus],
    ended_ranks: Sequence[int],
    stepless_ranks: list[int],
) -> Diagnosis:
    """Returns the diagnosis of a hang whose reports do not tell the rank at fault."""
    still_s = min(worker.step_s for worker in workers)
    step = max(worker.step for worker in workers)
    message = f"no rank has completed a step for {still_s:g} s"
    if ended_ranks:
        message += f": {_listed_ranks(sorted(ended_ranks))} ended before the others, which may wait"
    else:
        stepless = _listed_ranks(stepless_ranks)
        message += f"; {stepless} reports no steps, so the rank at fault is unknown"
    return Diagnosis("collective_hung", message, step=step - 1 if step else None)


def _phase_limit_s(workers: Collection[WorkerStatus]) -> float:
    """Returns how long no rank needs to make progress because one of them saves, evaluates or the
    like."""
    limits_s = [worker.limit_s for worker in workers if worker.limit_s is not None]
    return max(limits_s, default=0.0)


def _waits(worker: WorkerStatus, plan: Plan) -> bool:
    """Whether a worker waits for others, as far as its last report is still true.

    The trainer reports twice a second from a thread of its own; a program reports only when it
    makes progress, so its silence contradicts nothing.
    """
    return worker.waiting is not None and (plan.program or not _is_mute(worker))


def _innocence(worker: WorkerStatus) -> tuple:
    """Sorts workers that do not wait: the first is at fault.

    If a phase has exceeded its limit, it is a rank in that phase.
    """
    return worker.step, worker.limit_s is None, -worker.still_s, worker.rank


def _is_mute(worker: WorkerStatus) -> bool:
    return worker.silent_s is not None and worker.silent_s > _MUTE_S


def hang_timeout_s(workers: Collection[WorkerStatus], rules: Policy) -> float:
    """Returns the seconds without a completed step of any rank after which a run hangs."""
    step_times_s = [worker.usual_step_s for worker in workers if worker.usual_step_s is not None]
    is_slow_phase = any(
        worker.limit_s is None and worker.phase in SLOW_PHASES for worker in workers
    )
    if len(step_times_s) < len(workers) or is_slow_phase:
        return max(rules.start_hang_after_s, rules.hang_after_s)
    return max(rules.hang_after_s, rules.hang_after_steps * statistics.median(step_times_s))


def slowdown(
    plan: Plan,
    workers: Collection[WorkerStatus],
    medians_s: Mapping[tuple[str, int], float],
    least_ratio: float,
) -> float | None:
    """Returns the own compute time of a node's slowest rank over its peers' median.

    Returns None if the node is not a straggler. Own time excludes the time spent waiting for other
    ranks, so ranks that wait for a straggler are not stragglers.
    """
    ratios = []
    for worker in filter(_is_timed, workers):
        rank = plan.ranks[worker.rank]
        own_s = _scaled_own_s(plan, worker)
        usual_s = medians_s.get((rank.node, rank.coord.pp), 0.0)
        min_excess_s = max(_MIN_EXCESS_S, _MIN_EXCESS_SHARE * (worker.usual_step_s or 0.0))
        if usual_s <= 0 or own_s - usual_s <= min_excess_s:
            continue
        if own_s / usual_s >= least_ratio:
            ratios.append(round(own_s / usual_s, 2))
    return max(ratios, default=None)


def peer_medians_s(plan: Plan, workers: Collection[WorkerStatus]) -> dict[tuple[str, int], float]:
    """Returns (node, stage) -> median own compute time of that stage's ranks on other nodes,
    seconds.

    Sorts once per stage and skips a node's own ranks, since there may be 16,384 ranks.
    """
    times_by_stage: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for worker in filter(_is_timed, workers):
        rank = plan.ranks[worker.rank]
        times_by_stage[rank.coord.pp].append((_scaled_own_s(plan, worker), rank.node))
    medians: dict[tuple[str, int], float] = {}
    for stage, times in times_by_stage.items():
        times.sort()
        indices_by_node: dict[str, list[int]] = defaultdict(list)
        for index, (_, node) in enumerate(times):
            indices_by_node[node].append(index)
        for node, node_indices in indices_by_node.items():
            peer_count = len(times) - len(node_indices)
            if peer_count:
                low_index = _index_outside(node_indices, (peer_count - 1) // 2)
                high_index = _index_outside(node_indices, peer_count // 2)
                medians[node, stage] = (times[low_index][0] + times[high_index][0]) / 2
    return medians


def _index_outside(excluded: Collection[int], position: int) -> int:
    """Returns the index of the `position`-th element not in `excluded`, which is sorted."""
    for index in excluded:
        position += index <= position
    return position


def _is_timed(worker: WorkerStatus) -> bool:
    return worker.usual_own_s is not None and bool(worker.usual_step_s)


def _scaled_own_s(plan: Plan, worker: WorkerStatus) -> float:
    """Returns a rank's own seconds, scaled to the replica with the most micro-batches."""
    parallel = plan.parallel
    assert worker.usual_own_s is not None
    if plan.program:  # its batches are unknown
        return worker.usual_own_s
    replica = replica_of(parallel, plan.ranks[worker.rank].coord)
    return worker.usual_own_s * parallel.micro_batches / computed(parallel, replica)


def _rank_diagnosis(
    kind: str,
    plan: Plan,
    worker: WorkerStatus,
    workers: Collection[WorkerStatus],
    behavior: str,
) -> Diagnosis:
    rank = plan.ranks[worker.rank]
    location = f"rank {worker.rank} on {rank.node} (gpu {rank.gpu})"
    return Diagnosis(
        kind,
        text=f"{location} {_situation(worker, workers)}: {behavior}",
        rank=worker.rank,
        node=rank.node,
        step=worker.step - 1 if worker.step else None,
    )


def _situation(worker: WorkerStatus, workers: Collection[WorkerStatus]) -> str:
    """Describes the point of the step at which a worker hangs."""
    if not worker.step:
        return "had not begun to train"
    phase = "at work"
    if worker.phase not in ("", "start", "step"):
        phase = f"in {worker.phase}"
    peers = [peer for peer in workers if peer.rank != worker.rank]
    awaited = Counter(peer.waiting for peer in peers if peer.waiting)
    if worker.waiting or not awaited:
        return f"is {phase} of step {worker.step}"
    collective, _ = awaited.most_common(1)[0]
    situation = f"did not enter {collective} of step {worker.step}"
    return situation if phase == "at work" else f"{situation}, {phase}"


def _network_diagnosis(watched: Collection[WorkerStatus]) -> Diagnosis:
    """Returns the diagnosis of a hang in which every rank waits."""
    ranks_by_collective: dict[str, list[int]] = {}
    for worker in sorted(watched, key=lambda worker: worker.rank):
        collective = f"{worker.waiting} of step {worker.step}"
        ranks_by_collective.setdefault(collective, []).append(worker.rank)
    groups = list(ranks_by_collective.items())[:4]
    waiting_ranks = "; ".join(f"{_listed_ranks(ranks)} in {name}" for name, ranks in groups)
    still_s = min(worker.still_s for worker in watched)
    step = min(worker.step for worker in watched)
    text = (
        f"every rank waits for another, for {still_s:g} s ({waiting_ranks}): no rank is missing,"
        " so the network is at fault"
    )
    return Diagnosis("collective_hung", text, step=step - 1 if step else None)


def _listed_ranks(ranks: list[int]) -> str:
    first_ranks = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {first_ranks}{more}"


def reported_workers(
    workers_by_node: Mapping[str, Collection[WorkerStatus]], plan: Plan
) -> list[WorkerStatus]:
    """Returns the statuses of all ranks, each as reported by the agent of its own node."""
    return [
        worker
        for node, workers in workers_by_node.items()
        for worker in workers
        if _runs_on(plan, worker.rank, node)
    ]


def _runs_on(plan: Plan, rank: int, node: str) -> bool:
    return 0 <= rank < len(plan.ranks) and plan.ranks[rank].node == node
