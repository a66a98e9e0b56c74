"""What is to be done for one run, from what there is of it. Pure: the same objects give the same
steps, however often.

Nothing is remembered between two looks but what the API server and the ledger hold, so a controller
that is killed anywhere leaves nothing half decided: the next one comes to the same steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.backends.kubernetes.phases import SETUP_FAILURES, stuck_pods
from orchestrator.backends.kubernetes.train_run import TrainRun
from orchestrator.plan.exits import Exit

from .ledger import Allocation
from .observed import Job, Pod

UNSCHEDULABLE_S = 30.0  # after which a pod that was let go is given another node
SETUP_S = 120.0  # the same of one whose image cannot be pulled there
ALL_SETUP_S = 600.0  # of all of them: then the run gives its nodes back and tries again later
CROWDED_HOLD_S = 60.0  # a run that misses nodes keeps the others this long while others wait
QUOTA_S = 20.0  # a Job without all its pods is asked why
DRAFT_S = 180.0  # no submission takes that long


class Seen(Struct, frozen=True, kw_only=True):
    """One run as it is now."""

    run: TrainRun
    job: Job | None
    pods: Sequence[Pod]
    allocation: Allocation | None
    queued: bool = False  # Kueue places it
    planned: bool = True  # what it is rendered from is there
    least: int = 1  # nodes with which it goes on
    fits: Collection[str] = ()  # of its nodes, those that its pods may be put on now
    ready: Collection[str] = ()  # nodes that answer
    crowded: bool = False  # others wait for room
    hold_s: float = 1800.0  # how long it waits for a node that it misses
    no_quota: str = ""  # why its Job cannot make all pods
    changed: bool = False  # there is a plan of other words than the one in force
    lost: int = 0  # pods that have gone since the last look, of a Job that is to go on
    now: float = 0.0


# ------------------------------------------------------------------------------------------ steps


class Plan(Struct, frozen=True, tag=True):
    """Make the plan from the spec's words."""


class Wait(Struct, frozen=True, tag=True):
    """It may be given nodes."""


class Make(Struct, frozen=True, tag=True):
    """Send the objects of this generation."""

    generation: int


class Remove(Struct, frozen=True, tag=True):
    """Delete the Job: its pods save and leave, by force at once."""

    force: bool = False


class Give(Struct, frozen=True, tag=True):
    """Take the gate off a pod, which then goes to this node and to no other. `together`: nodes that
    its run has now."""

    pod: str
    node: str
    together: int = 0


class Move(Struct, frozen=True, tag=True):
    """End a pod that cannot run where it is, as a drain does; the next of its index gets another
    node."""

    pod: str
    index: int
    node: str
    why: str


class Exclude(Struct, frozen=True, tag=True):
    """Do not give the node to this run again for a while."""

    node: str


class Sick(Struct, frozen=True, tag=True):
    """Leave the node out, for every run, for a while."""

    node: str
    why: str


class Replace(Struct, frozen=True, tag=True):
    """Another node for these indices, whose nodes are gone or unfit."""

    indices: list[int]


class Bury(Struct, frozen=True, tag=True):
    """Mark a pod of a dead node as failed by a disruption, and delete it."""

    pod: str
    node: str


class Yield(Struct, frozen=True, tag=True):
    """Give all nodes back and wait for room again. `wait`: not before some time has passed, longer
    each time."""

    why: str
    wait: bool = False


class Release(Struct, frozen=True, tag=True):
    """Nothing of it is left on its nodes."""


class Discard(Struct, frozen=True, tag=True):
    """Delete the TrainRun: its submission broke off."""


Step = (
    Plan
    | Wait
    | Make
    | Remove
    | Give
    | Move
    | Exclude
    | Sick
    | Replace
    | Bury
    | Yield
    | Release
    | Discard
)


def decide(seen: Seen) -> list[Step]:
    """The steps that bring the run nearer to what its spec wants."""
    run = seen.run
    job = seen.job
    given = seen.allocation
    age = seen.now - _created(run)
    if run.spec.draft:
        return [Discard()] if age > DRAFT_S else []
    if run.is_over or run.spec.stopped or (given is not None and given.ending):
        return _end(seen)
    if not seen.planned:
        return [Plan()]
    if (
        job is not None and job.finished
    ):  # of an attempt before this one: what it came to is in the status
        return _end(seen) if given is not None or _living(seen.pods) else [Remove()]
    if job is not None and (job.leaves or (given is None and not seen.queued)):
        return _end(seen)
    if seen.queued:
        return _queued(seen)
    if given is None:
        return [Wait()] if _living(seen.pods) == [] else []
    if job is None:
        return [Make(given.generation)] if _living(seen.pods) == [] else []
    if job.generation != given.generation:
        return _end(seen)
    return _tend(seen, given)


def _queued(seen: Seen) -> list[Step]:
    """A run that Kueue places: its Job is there, or made, or of another plan or size than is wanted
    by now."""
    run = seen.run
    job = seen.job
    status = seen.run.status
    if job is None:
        begun = status.generation > status.ended_generation
        return [Make(status.generation + (0 if begun else 1))] if not _living(seen.pods) else []
    wanted = run.spec.nodes or job.spec.completions
    return _bury(seen) if not seen.changed and wanted == job.spec.completions else _end(seen)


def _end(seen: Seen) -> list[Step]:
    """Takes its Job down where that lives, and gives back what it held when nothing is left of it
    there."""
    job = seen.job
    spec = seen.run.spec
    if job is not None and not job.finished:
        force = spec.stopped and spec.force
        return _bury(seen) if job.leaves and not force else [Remove(force)]
    if _living(seen.pods):
        return _bury(seen)
    return [Release()] if seen.allocation is not None else []


def _living(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if not pod.ended]


def _created(run: TrainRun) -> float:
    from orchestrator.backends.kubernetes.phases import seconds_of

    return seconds_of(run.metadata.creation_timestamp) or 0.0


# ------------------------------------------------------------------------------------ a run at work


def _tend(seen: Seen, given: Allocation) -> list[Step]:
    """Pods of a Job that is alive: each to its node, and away from where it cannot run."""
    living = {pod.index: pod for pod in _living(seen.pods) if pod.index >= 0}
    steps = _bury(seen)
    lost: list[int] = []
    for index, node in enumerate(given.nodes):
        pod = living.get(index)
        fits = bool(node) and node in seen.fits
        if pod is None or pod.leaves:
            if not fits and pod is None:
                lost.append(index)
        elif pod.gated:
            if fits:
                steps.append(Give(pod.metadata.name, node, len(given.held)))
            elif node:  # whoever else may still act on it finds it gone
                steps.append(Move(pod.metadata.name, index, node, "its node is out of service"))
            else:
                lost.append(index)
        elif why := _misplaced(pod, node, seen):
            steps.append(Move(pod.metadata.name, index, pod.spec.node_name or node, why))
    steps += _sick(seen)
    if lost:
        steps.append(Replace(lost))
    if (giving_up := _hopeless(seen, given, list(living.values()))) is not None:
        return [giving_up]
    return steps


def _misplaced(pod: Pod, node: str, seen: Seen) -> str:
    """Why a pod that was let go should leave its node, "" if it need not."""
    if pod.spec.node_name and pod.spec.node_name != node:
        return f"is on node {pod.spec.node_name} instead of {node or 'none'}"
    for one in pod.status.conditions:
        if (
            one.type == "PodScheduled"
            and one.reason == "Unschedulable"
            and _age(pod, seen) > UNSCHEDULABLE_S
        ):
            return f"the scheduler does not put it there: {one.message}"
    if (why := setup_failure(pod)) and _age(pod, seen) > SETUP_S and _some_run(seen):
        return why
    return ""


def _age(pod: Pod, seen: Seen) -> float:
    return seen.now - pod.created_at


def _some_run(seen: Seen) -> bool:
    """What one pod lacks, others of the run have: it is the node's."""
    return any(pod.running for pod in seen.pods)


def setup_failure(pod: Pod) -> str:
    """Why its container cannot be made, as the kubelet says."""
    for one in pod.status.container_statuses or ():
        if (waiting := one.state.waiting) and waiting.reason in SETUP_FAILURES:
            return f"{waiting.reason}: {waiting.message}".strip(": ")
    return ""


def _sick(seen: Seen) -> list[Step]:
    """Nodes whose agents have said so (74)."""
    return [
        Sick(pod.spec.node_name, f"an agent of {seen.run.key} found it unhealthy (74)")
        for pod in seen.pods
        if pod.exit_code == Exit.NODE and pod.spec.node_name and pod.spec.node_name in seen.fits
    ]


def _hopeless(seen: Seen, given: Allocation, living: Sequence[Pod]) -> Step | None:
    """Why the run should rather give its nodes to others: it cannot use them now."""
    if seen.no_quota and not any(pod.running for pod in living):
        return Yield(seen.no_quota, wait=True)
    failures = [
        why for pod in living if (why := setup_failure(pod)) and _age(pod, seen) > ALL_SETUP_S
    ]
    if failures and len(failures) >= len([pod for pod in living if not pod.gated]):
        return Yield(failures[0], wait=True)
    missing = given.nodes.count("")
    hold = min(seen.hold_s, CROWDED_HOLD_S) if seen.crowded else seen.hold_s
    if (
        missing
        and len(given.nodes) - missing < seen.least
        and given.lost_at
        and seen.now > given.lost_at + hold
    ):
        return Yield(
            f"{missing} of {len(given.nodes)} nodes were lost and none has taken their place"
        )
    return None


def _bury(seen: Seen) -> list[Step]:
    """Pods that hang in Terminating on nodes that are gone. Of a run of one pod that is left to
    people: it has no peers whose absence would keep it from going on there, where only the network
    is lost."""
    pods = _living(seen.pods)
    many = (
        len(seen.allocation.nodes)
        if seen.allocation
        else (seen.job.spec.completions if seen.job else len(pods))
    )
    if many < 2:
        return []
    bodies: list[Mapping[str, Any]] = [pod.body() for pod in pods if pod.leaves]
    hanging = {pod["metadata"]["name"] for pod in stuck_pods(bodies, seen.now)}
    return [
        Bury(pod.metadata.name, pod.spec.node_name)
        for pod in pods
        if pod.metadata.name in hanging
        and pod.spec.node_name
        and pod.spec.node_name not in seen.ready
    ]
