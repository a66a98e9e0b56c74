"""The cluster as it is now: what a plan is placed on, and what `cluster=kubernetes` plans on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime

from msgspec import Struct, field, structs

from orchestrator.cluster.importers.kubernetes import Node, Profile, from_nodes, profile_of, profiles
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit
from orchestrator.suggest import did_you_mean

from .api.client import Cluster, gather, in_background
from .names import NODES, selector
from .objects.node_affinity import Chosen, check_levels, choose
from .options import KubernetesOptions

_LEASE, _LEASE_S, _LEASE_WAIT_S = "orch-placement", 20, 60.0


class Place(Struct, frozen=True):
    """What is known of where a run may go."""

    topology: Topology | None = None
    chosen: Chosen | None = None
    warnings: tuple[str, ...] = ()


class NoNodes(OrchError):
    """There is nothing to place on, yet: a cluster may grow them when pods ask."""


class Look(Struct, frozen=True):
    """The nodes, and which of them hold pods with GPUs."""

    nodes: list[Node]
    used: dict[str, str] = {}


def look(cluster: Cluster, options: KubernetesOptions, plans_places: bool = True) -> Look:
    """What `place` wants to know. `plans_places`: no queue places the run. OrchError (76, 78), NoNodes."""
    wanted = ",".join(f"{key}={value}" for key, value in sorted(options.node_selector.items()))
    used = in_background(lambda: _used(cluster)) if plans_places else None
    nodes = cluster.read("Node", Node, wanted, cached=True)
    if not nodes:
        raise NoNodes(f"the cluster has no nodes{f' with the labels {wanted}' if wanted else ''}", Exit.CAPACITY)
    return Look(nodes, used.result() if used else {})


@contextlib.contextmanager
def place(
    cluster: Cluster,
    plan: Plan,
    options: KubernetesOptions,
    run_id: str,
    looked: Future[Look] | None = None,
) -> Iterator[Place]:
    """The topology, and without a queue the nodes for the plan. The body creates the Job.

    All or nothing: nodes that a living run was given are not given again, and two submitters in one namespace take
    turns while they choose and create (a Lease), so no two runs ever wait for each other's nodes. OrchError (76) when
    there is no room now. `looked`: what `look` was asked for before, while the plan was made.
    """
    check_levels(plan, options)
    check_queue(cluster, options)
    others_place = options.queue is not None or plan.cluster.device == "cpu"
    try:
        seen = looked.result() if looked else look(cluster, options, not others_place)
        topology = _topology(seen, profile(options))
    except NoNodes as error:
        if not others_place:
            raise
        yield Place(warnings=(f"{error.message} yet: placed without knowing the network",))
        return
    except OrchError as error:
        if getattr(error, "status", None) != 403:
            raise
        text = f"nodes cannot be read ({error.message}): placed without knowing the network"
        yield Place(warnings=(text,))
        return
    if others_place:
        yield Place(topology)
        return
    with _turn(cluster, run_id):
        topology = _without_taken(topology, _taken(cluster))
        yield Place(topology, choose(plan, topology, _tier_labels(options, topology)))


def check_queue(cluster: Cluster, options: KubernetesOptions) -> None:
    """OrchError (65) for a queue or priority that the cluster does not have: Kueue would keep the run waiting for it.

    Where they may not be listed, nothing is said here; `orch status` has Kueue's own words.
    """
    if options.queue is None:
        return
    for option, kind in (("queue", "LocalQueue"), ("workload_priority", "WorkloadPriorityClass")):
        name = getattr(options, option)
        known = _names(cluster, kind) if name is not None else None
        if known is not None and name not in known:
            where = f" in namespace {cluster.namespace}" if kind == "LocalQueue" else ""
            hint = did_you_mean(name, known) if known else "there is none"
            raise OrchError(f"backend.options.{option}: no {kind} {name!r}{where}; {hint}", Exit.CONFIG)


def _names(cluster: Cluster, kind: str) -> list[str] | None:
    """Of Kueue's objects of a kind; None where they may not be listed. OrchError (65) when the cluster has no Kueue."""
    for version in (kind, f"Old{kind}"):
        try:
            return [body["metadata"]["name"] for body in cluster.list(version)]
        except OrchError as error:
            if getattr(error, "status", None) == 403:
                return None
            if getattr(error, "status", None) != 404:
                raise
            absent = error
    raise absent


def profile(options: KubernetesOptions) -> str | Profile:
    """Labels of the levels, if they are named, innermost first as in the plan; else a profile by its name."""
    if options.levels:
        return Profile(levels={name: [label] for name, label in reversed(options.levels.items())})
    return profile_named(options.profile)


def profile_named(text: str) -> str | Profile:
    """A shipped profile by its name, or labels: `zone=LABEL,rack=LABEL`, coarse to fine."""
    return profile_of(text) if "=" in text else text


def live_topology(cluster: Cluster, profile: str | Profile = "auto") -> Topology:
    """Nodes that pods may go to, GPUs, and what is free of them under the cluster's own switches. OrchError (65, 76,
    78)."""
    return _topology(look(cluster, KubernetesOptions()), profile)


def _topology(seen: Look, profile: str | Profile) -> Topology:
    return _without_taken(structs.replace(from_nodes(seen.nodes, profile), name="kubernetes"), seen.used)


def _tier_labels(options: KubernetesOptions, topology: Topology) -> dict[str, str]:
    if options.levels:
        return dict(options.levels)
    shipped = profiles().get(options.profile)
    return {name: keys[0] for name, keys in (shipped.levels if shipped else {}).items()}


class _Named(Struct):
    name: str


class _Resources(Struct):
    limits: dict[str, str | int] | None = None


class _Container(Struct):
    resources: _Resources = field(default_factory=_Resources)


class _Spec(Struct):
    containers: list[_Container] = []
    node: str = field(default="", name="nodeName")


class _Pod(Struct):
    """The fields of `v1.Pod` that tell which GPUs it has."""

    metadata: _Named
    spec: _Spec

    @property
    def gpus(self) -> int:
        amounts = [container.resources.limits or {} for container in self.spec.containers]
        return sum(int(count) for amount in amounts for name, count in amount.items() if name.endswith("/gpu"))


def _used(cluster: Cluster) -> dict[str, str]:
    """Node -> pod that has GPUs there, of any namespace if that may be read, else of our own."""
    alive = "status.phase!=Succeeded,status.phase!=Failed"
    try:
        pods = cluster.read("AllPods", _Pod, fields=alive)
    except OrchError as error:
        if getattr(error, "status", None) != 403:
            raise
        pods = cluster.read("Pod", _Pod, fields=alive)
    return {pod.spec.node: pod.metadata.name for pod in pods if pod.spec.node and pod.gpus}


def _taken(cluster: Cluster) -> dict[str, str]:
    """Node -> living run of this namespace that was given it, whether or not its pods are there yet."""
    found = {}
    kinds = (lambda: cluster.list("Job", selector()), lambda: cluster.list("JobSet", selector(), absent_ok=True))
    for jobs in gather(kinds):
        for job in jobs:
            ended = any(
                c.get("status") == "True" and c.get("type") in ("Complete", "Completed", "Failed")
                for c in job.get("status", {}).get("conditions") or ()
            )
            if not ended:
                names = (job["metadata"].get("annotations") or {}).get(NODES, "")
                found |= dict.fromkeys(filter(None, names.split(",")), job["metadata"]["name"])
    return found


def _without_taken(topology: Topology, taken: dict[str, str]) -> Topology:
    machines = {
        name: structs.replace(machine, free=False, reason=f"has pod {taken[name]}") if name in taken else machine
        for name, machine in topology.machines.items()
    }
    return structs.replace(topology, machines=machines)


# ------------------------------------------------------------------------------------------ taking turns


@contextlib.contextmanager
def _turn(cluster: Cluster, run_id: str) -> Iterator[None]:
    """Hold the namespace's placement Lease. A holder that died is overtaken after _LEASE_S seconds."""
    end = time.monotonic() + _LEASE_WAIT_S
    while not _take(cluster, run_id):
        if time.monotonic() > end:
            raise OrchError(f"other submissions hold Lease {_LEASE}: try again", Exit.CAPACITY)
        time.sleep(0.3)
    try:
        yield
    finally:
        with contextlib.suppress(OrchError):
            cluster.delete("Lease", _LEASE)


def _take(cluster: Cluster, run_id: str) -> bool:
    now = datetime.now(UTC)
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": _LEASE, "namespace": cluster.namespace},
        "spec": {
            "holderIdentity": run_id,
            "leaseDurationSeconds": _LEASE_S,
            "acquireTime": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        },
    }
    if cluster.create(body) is not None:
        return True
    there: Sequence[dict] = [found] if (found := cluster.get("Lease", _LEASE)) else []
    for lease in there:
        since = datetime.fromisoformat(lease["spec"]["acquireTime"])
        if (now - since).total_seconds() > _LEASE_S:
            cluster.delete("Lease", _LEASE)
    return False
