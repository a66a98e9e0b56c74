"""Decides what to do for one run from its current objects. Pure: the same objects give the same
steps, however often.

Nothing is remembered between two looks except what the API server and the ledger hold, so a
controller that is killed at any point leaves nothing half decided: the next one comes to the same
steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from orchestrator.backends.kubernetes.names import Body
from orchestrator.backends.kubernetes.phases import SETUP_FAILURES, stuck_pods
from orchestrator.backends.kubernetes.train_run import TrainRun
from orchestrator.plan.exits import Exit

from .ledger import Allocation
from .observed import Job, Pod

UNSCHEDULABLE_S = 30.0  # after which an ungated pod gets another node
SETUP_S = 120.0  # after which a pod whose image cannot be pulled gets another node
ALL_SETUP_S = 600.0  # if no pod can pull its image: the run gives its nodes back and retries later
CROWDED_HOLD_S = 60.0  # how long a run that lacks nodes keeps the rest while other runs wait
QUOTA_S = 20.0  # after which the events of a Job without all its pods are read
DRAFT_S = 600.0  # after which a draft is deleted: no submission takes that long


class Seen(Struct, frozen=True, kw_only=True):
    """One run as it is now."""

    run: TrainRun
    job: Job | None
    pods: Sequence[Pod]
    allocation: Allocation | None
    queued: bool = False  # Kueue places the run
    planned: bool = True  # the bundle that it is rendered from exists
    least: int = 1  # fewest nodes with which it can run
    fits: Collection[str] = ()  # those of its nodes that its pods may use now
    ready: Collection[str] = ()  # nodes that answer
    crowded: bool = False  # other runs wait for nodes
    hold_s: float = 1800.0  # how long it waits for a missing node
    no_quota: str = ""  # why its Job cannot create all pods
    changed: bool = False  # the spec's words changed, and their plan is ready
    lost: int = 0  # pods lost since the last look, of a Job that should keep running
    now: float = 0.0


# ------------------------------------------------------------------------------------------ steps


class Plan(Struct, frozen=True, tag=True):
    """Plan the job from the spec's words."""


class Wait(Struct, frozen=True, tag=True):
    """Let the run wait for nodes."""


class Make(Struct, frozen=True, tag=True):
    """Send the objects of this generation."""

    generation: int


class Remove(Struct, frozen=True, tag=True):
    """Delete the Job: its pods save and exit, or are killed with `force`."""

    force: bool = False


class Ungate(Struct, frozen=True, tag=True):
    """Remove the scheduling gate from a pod and pin it to this node. `together`: nodes that its run
    has now."""

    pod: str
    node: str
    together: int = 0


class Move(Struct, frozen=True, tag=True):
    """Evict a pod that cannot run on its node, as a drain does; the next pod of its index gets
    another node."""

    pod: str
    index: int
    node: str
    reason: str


class Exclude(Struct, frozen=True, tag=True):
    """Do not give the node to this run for a while."""

    node: str


class MarkBad(Struct, frozen=True, tag=True):
    """Exclude the node for every run for a while."""

    node: str
    reason: str


class Replace(Struct, frozen=True, tag=True):
    """Find other nodes for these indices, whose nodes are gone or unfit."""

    indices: list[int]


class ForceDelete(Struct, frozen=True, tag=True):
    """Mark a pod of a dead node as failed by a disruption, and delete it."""

    pod: str
    node: str


class Yield(Struct, frozen=True, tag=True):
    """Give all nodes back and wait for nodes once more. `wait`: only after some time, longer each
    time."""

    reason: str
    wait: bool = False


class Release(Struct, frozen=True, tag=True):
    """Free the run's nodes: no pod of it is left on them."""


class Discard(Struct, frozen=True, tag=True):
    """Delete the TrainRun, because its submission broke off."""


Step = (
    Plan
    | Wait
    | Make
    | Remove
    | Ungate
    | Move
    | Exclude
    | MarkBad
    | Replace
    | ForceDelete
    | Yield
    | Release
    | Discard
)


def decide(seen: Seen) -> list[Step]:
    """Returns the steps that bring the run closer to its spec."""
    run = seen.run
    job = seen.job
    allocation = seen.allocation
    age = seen.now - _created(run)
    if run.spec.draft:
        return [Discard()] if age > DRAFT_S else []
    if run.is_over or run.spec.stopped or (allocation is not None and allocation.ending):
        return _end(seen)
    if not seen.planned:
        return [Plan()]
    # a Job of an earlier attempt: its result is in the status
    if job is not None and job.finished:
        return _end(seen) if allocation is not None or _living(seen.pods) else [Remove()]
    if job is not None and (job.leaves or (allocation is None and not seen.queued)):
        return _end(seen)
    if seen.queued:
        return _queued(seen)
    if allocation is None:
        return [Wait()] if _living(seen.pods) == [] else []
    if job is None:
        return [Make(allocation.generation)] if _living(seen.pods) == [] else []
    if job.generation != allocation.generation:
        return _end(seen)
    return _tend(seen, allocation)


def _queued(seen: Seen) -> list[Step]:
    """Steps of a run that Kueue places: its Job is created, or replaced if its plan or size has
    changed."""
    run = seen.run
    job = seen.job
    status = seen.run.status
    if job is None:
        if _living(seen.pods):
            return []
        started = status.generation > status.ended_generation
        return [Make(status.generation if started else status.generation + 1)]
    size = run.spec.nodes or job.spec.completions
    if seen.changed or size != job.spec.completions:
        return _end(seen)
    return _force_delete(seen)


def _end(seen: Seen) -> list[Step]:
    """Deletes the Job if it lives, and releases the nodes once no pod is left on them."""
    job = seen.job
    spec = seen.run.spec
    if job is not None and not job.finished:
        force = spec.stopped and spec.force
        return _force_delete(seen) if job.leaves and not force else [Remove(force)]
    if _living(seen.pods):
        return _force_delete(seen)
    return [Release()] if seen.allocation is not None else []


def _living(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if not pod.ended]


def _created(run: TrainRun) -> float:
    from orchestrator.backends.kubernetes.phases import seconds_of

    return seconds_of(run.metadata.creation_timestamp) or 0.0


# --------------------------------------------------------------------------------- a run that is up


def _tend(seen: Seen, allocation: Allocation) -> list[Step]:
    """Sends each pod of a living Job to its node, and away from a node where it cannot run."""
    living = {pod.index: pod for pod in _living(seen.pods) if pod.index >= 0}
    steps = _force_delete(seen)
    lost: list[int] = []
    for index, node in enumerate(allocation.nodes):
        pod = living.get(index)
        fits = bool(node) and node in seen.fits
        if pod is None or pod.leaves:
            if not fits and pod is None:
                lost.append(index)
        elif pod.gated:
            if fits:
                steps.append(Ungate(pod.metadata.name, node, len(allocation.held)))
            elif node:  # another controller that may still act on it finds it gone
                steps.append(Move(pod.metadata.name, index, node, "its node is out of service"))
            else:
                lost.append(index)
        elif reason := _misplaced(pod, node, seen):
            steps.append(
                Move(
                    pod.metadata.name,
                    index,
                    pod.spec.node_name or node,
                    reason,
                )
            )
    steps += _mark_bad(seen)
    if lost:
        steps.append(Replace(lost))
    if (giving_up := _hopeless(seen, allocation, list(living.values()))) is not None:
        return [giving_up]
    return steps


def _misplaced(pod: Pod, node: str, seen: Seen) -> str:
    """Returns why an ungated pod should leave its node, "" if it need not."""
    if pod.spec.node_name and pod.spec.node_name != node:
        return f"is on node {pod.spec.node_name} instead of {node or 'none'}"
    age = _age(pod, seen)
    for condition in pod.status.conditions:
        refused = condition.type == "PodScheduled" and condition.reason == "Unschedulable"
        if refused and age > UNSCHEDULABLE_S:
            return f"the scheduler does not put it there: {condition.message}"
    failure = setup_failure(pod)
    if failure and age > SETUP_S and _some_run(seen):
        return failure
    return ""


def _age(pod: Pod, seen: Seen) -> float:
    return seen.now - pod.created_at


def _some_run(seen: Seen) -> bool:
    """Tells whether other pods of the run have what one pod lacks: then the failure is the
    node's."""
    return any(pod.running for pod in seen.pods)


def setup_failure(pod: Pod) -> str:
    """Returns why the pod's container cannot be created, in the kubelet's words."""
    for container in pod.status.container_statuses or ():
        if (waiting := container.state.waiting) and waiting.reason in SETUP_FAILURES:
            return f"{waiting.reason}: {waiting.message}".strip(": ")
    return ""


def _mark_bad(seen: Seen) -> list[Step]:
    """Marks nodes as bad whose agents exited with 74."""
    return [
        MarkBad(pod.spec.node_name, f"an agent of {seen.run.key} found it unhealthy (74)")
        for pod in seen.pods
        if pod.exit_code == Exit.NODE and pod.spec.node_name and pod.spec.node_name in seen.fits
    ]


def _hopeless(seen: Seen, allocation: Allocation, living: Sequence[Pod]) -> Step | None:
    """Returns the step by which the run gives its nodes to others because it cannot use them now,
    or None."""
    if seen.no_quota and not any(pod.running for pod in living):
        return Yield(seen.no_quota, wait=True)
    old_pods = [pod for pod in living if _age(pod, seen) > ALL_SETUP_S]
    failures = list(filter(None, map(setup_failure, old_pods)))
    if failures and len(failures) >= len([pod for pod in living if not pod.gated]):
        return Yield(failures[0], wait=True)
    missing = allocation.nodes.count("")
    hold = min(seen.hold_s, CROWDED_HOLD_S) if seen.crowded else seen.hold_s
    too_few = missing and len(allocation.nodes) - missing < seen.least
    if too_few and allocation.lost_at and seen.now > allocation.lost_at + hold:
        return Yield(
            f"{missing} of {len(allocation.nodes)} nodes were lost and none has taken their place"
        )
    return None


def _force_delete(seen: Seen) -> list[Step]:
    """Steps for pods that hang in Terminating on nodes that are gone. A run of one pod is left to
    people: it has no peers whose absence would stop it where only the network is lost."""
    pods = _living(seen.pods)
    if seen.allocation is not None:
        size = len(seen.allocation.nodes)
    else:
        size = seen.job.spec.completions if seen.job else len(pods)
    if size < 2:
        return []
    bodies: list[Body] = [pod.body() for pod in pods if pod.leaves]
    hanging = {pod["metadata"]["name"] for pod in stuck_pods(bodies, seen.now)}
    return [
        ForceDelete(pod.metadata.name, pod.spec.node_name)
        for pod in pods
        if pod.metadata.name in hanging
        and pod.spec.node_name
        and pod.spec.node_name not in seen.ready
    ]
