"""The cluster as it is now: nodes for a plan, and the topology that `cluster=kubernetes` plans
on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import Struct, structs

from orchestrator.cluster.importers.kubernetes import (
    Node,
    Profile,
    from_nodes,
    gpu_nodes,
    pick_profile,
    profile_of,
    tier_labels,
)
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import Exit

from .api.client import Cluster, gather, in_background
from .devices import NOT_READ, GpuDevices, asks_by_claim, read_devices, with_devices
from .fitting import EXCLUDED, PodNeeds, is_excluded, pod_needs, why_not
from .names import NODES, selector
from .objects.node_affinity import HOST, ChosenNodes, check_levels, choose, split_units
from .options import KubernetesOptions, places_itself
from .placement_lock import placement_lock
from .pod_requests import PodShape, pod_requests


class Reservation(Struct, frozen=True):
    """Nodes that a run may use, and what is known of their network."""

    topology: Topology | None = None
    chosen: ChosenNodes | None = None
    #: hostname labels of excluded nodes; None: unknown
    excluded: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()
    #: Called before and after the Job is sent. OrchError (76) if the placement lock has expired.
    check: Callable[[], None] = lambda: None


class NoNodes(OrchError):
    """The cluster has no nodes yet: an autoscaler may add them when pods need them."""


class ClusterSnapshot(Struct, frozen=True):
    """The nodes, and what the pods on them use."""

    nodes: Sequence[Node]
    used: dict[str, str] = {}
    requests: dict[str, dict[str, float]] = {}  # node -> sum of its pods' requests
    claims: dict[str, str] = {}  # node -> a pod that requests devices by a ResourceClaim
    devices: GpuDevices | None = None  # None: the run requests no GPUs by a ResourceClaim


def read_snapshot(
    cluster: Cluster,
    options: KubernetesOptions,
    used_too: bool = True,
) -> ClusterSnapshot:
    """Reads what `reserve_nodes` starts from. `used_too`: also reads which nodes have GPUs in use;
    a queue tracks that itself.

    OrchError (76, 78), NoNodes.
    """
    node_labels = ",".join(f"{key}={value}" for key, value in sorted(options.node_selector.items()))
    pods = in_background(lambda: _pods(cluster)) if used_too else None
    devices = in_background(lambda: read_devices(cluster)) if asks_by_claim(options) else None
    nodes = cluster.read("Node", Node, node_labels, cached=True)
    if not nodes:
        selected = f" with the labels {node_labels}" if node_labels else ""
        raise NoNodes(f"the cluster has no nodes{selected}", Exit.CAPACITY)
    usage = _usage(pods.result() if pods else ())
    return structs.replace(
        usage,
        nodes=nodes,
        devices=devices.result() if devices else None,
    )


class _View(Struct, frozen=True):
    """The snapshot as this run sees it: its pods' needs, and the network under its profile."""

    snapshot: ClusterSnapshot
    needs: PodNeeds
    workers: Sequence[Node]
    profile: Profile
    topology: Topology

    def excluded(self, options: KubernetesOptions) -> set[str]:
        """Returns the names of the nodes that the options exclude."""
        nodes = self.snapshot.nodes
        return {node.metadata.name for node in nodes if is_excluded(node, options)}

    @property
    def hosts(self) -> dict[str, str]:
        """Node -> its hostname label."""
        metadata = [node.metadata for node in self.snapshot.nodes]
        return {meta.name: meta.labels.get(HOST, meta.name) for meta in metadata}


def _view(snapshot: ClusterSnapshot, plan: Plan, options: KubernetesOptions) -> _View:
    gpu = options.gpu_resource if plan.cluster.device == "cuda" else ""
    needs = pod_needs(plan, options)
    if gpu and gpu not in needs.requests:
        snapshot = _with_claimed(snapshot, gpu)
    workers = gpu_nodes(snapshot.nodes, gpu)
    picked = pick_profile(workers, profile(options))
    return _View(
        snapshot,
        needs,
        workers,
        picked,
        _topology(snapshot, picked, gpu),
    )


@contextlib.contextmanager
def reserve_nodes(
    cluster: Cluster,
    plan: Plan,
    options: KubernetesOptions,
    run_id: str,
    snapshot: Future[ClusterSnapshot] | None = None,
) -> Iterator[Reservation]:
    """Yields the topology and, without a queue, the nodes for the plan. The body creates the Job.

    All or nothing: nodes of a living run are not given out again, and one submitter per namespace
    at a time chooses nodes and creates a Job (placement_lock.py), so no two runs ever wait for each
    other's nodes. `snapshot`: one whose reading began while the job was planned. OrchError (76) if
    too few nodes are free.
    """
    check_levels(plan, options)
    check_queue(cluster, options)
    queue_places = not places_itself(options) or plan.cluster.device == "cpu"
    try:
        if snapshot is not None:
            view = _view(snapshot.result(), plan, options)
        else:
            view = _view(read_snapshot(cluster, options, not queue_places), plan, options)
    except NoNodes as error:
        if not queue_places:
            raise
        yield Reservation(warnings=(f"{error.message} yet: placed without knowing the network",))
        return
    except OrchError as error:
        if getattr(error, "status", None) != 403:
            raise
        warning = f"nodes cannot be read ({error.message}): placed without knowing the network"
        yield Reservation(warnings=(warning,))
        return
    hosts = view.hosts
    excluded = view.excluded(options)
    excluded_hosts = tuple(hosts[name] for name in sorted(excluded))
    if queue_places:
        yield Reservation(view.topology, excluded=excluded_hosts)
        return
    with placement_lock(cluster, run_id) as check:
        topology = _without(view.topology, dict.fromkeys(excluded, EXCLUDED))
        topology = _fitting(topology, view.snapshot, view.needs)
        topology = _without_used(topology, _nodes_of_living_runs(cluster))
        labels = dict(options.levels) or tier_labels(view.workers, view.profile)
        chosen = choose(plan, topology, labels, hosts)
        network = topology
        if not labels and not view.profile.annotation:
            network = structs.replace(topology, tiers=())
        yield Reservation(
            topology=topology,
            chosen=chosen,
            excluded=excluded_hosts,
            warnings=_split_warning(plan, chosen, network),
            check=check,
        )


def _with_claimed(snapshot: ClusterSnapshot, gpu: str) -> ClusterSnapshot:
    """Returns the cluster as pods see it that request their GPUs by a ResourceClaim: nodes with
    published devices, and which of them are held."""
    devices = snapshot.devices or NOT_READ
    held = snapshot.claims if devices.held is None else devices.held
    nodes = with_devices(snapshot.nodes, gpu, devices)
    return structs.replace(snapshot, nodes=nodes, used=snapshot.used | held)


def _fitting(topology: Topology, snapshot: ClusterSnapshot, needs: PodNeeds) -> Topology:
    """Marks a node as free if the scheduler would take it for a pod of the run: a taint that the
    pod tolerates does not matter."""
    machines = dict(topology.machines)
    for node in snapshot.nodes:
        name = node.metadata.name
        machine = machines[name]
        if machine.free or machine.reason.startswith("taint "):
            obstacle = why_not(node, needs, snapshot.requests.get(name, {}))
            machines[name] = structs.replace(machine, free=not obstacle, reason=obstacle)
    return structs.replace(topology, machines=machines)


def _split_warning(plan: Plan, chosen: ChosenNodes, topology: Topology) -> tuple[str, ...]:
    """Warns of the predicted cost if pipelines do not fit under one switch, or no label says where
    the switches are."""
    split, units = split_units(plan, chosen.nodes, topology)
    if not split:
        return ()
    from orchestrator.cluster.nodes import with_nodes

    # needs numpy, which submissions without a split unit do not load
    from orchestrator.planner.elastic.replan import difference, replan

    network = structs.replace(topology, machines={})
    real_plan = replan(plan, with_nodes(plan.cluster, chosen.nodes, network))
    cost = difference(plan, real_plan).cost
    if cost < 0.0005:
        return ()
    location = "together: no label says what the network is"
    if topology.tiers:
        location = f"under one {topology.tiers[0].name}"
    return (f"{split} of {units} units of the plan are not {location}; predicted step {cost:+.1%}",)


def check_queue(cluster: Cluster, options: KubernetesOptions) -> None:
    """Refuses a queue or priority that the cluster does not have (OrchError, 65): Kueue would let
    the run wait for it forever.

    It checks nothing if they may not be listed; then `orch status` shows what Kueue reports of the
    run.
    """
    if options.queue is None:
        return
    for option, kind in (("queue", "LocalQueue"), ("workload_priority", "WorkloadPriorityClass")):
        name = getattr(options, option)
        existing = _names(cluster, kind) if name is not None else None
        if existing is not None and name not in existing:
            scope = f" in namespace {cluster.namespace}" if kind == "LocalQueue" else ""
            hint = did_you_mean(name, existing) if existing else "there is none"
            message = f"backend.options.{option}: no {kind} {name!r}{scope}; {hint}"
            raise OrchError(message, Exit.CONFIG)


def _names(cluster: Cluster, kind: str) -> list[str] | None:
    """Returns the names of Kueue's objects of a kind, or None if they may not be listed. OrchError
    (65) if the cluster has no Kueue."""
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
    """Returns the labels of the levels if the options name them, innermost first as in the plan;
    else a profile by its name."""
    if options.levels:
        return Profile(levels={name: [label] for name, label in reversed(options.levels.items())})
    return profile_named(options.profile)


def profile_named(name: str) -> str | Profile:
    """Returns a shipped profile by its name, or one of labels: `zone=LABEL,rack=LABEL`, coarse to
    fine."""
    return profile_of(name) if "=" in name else name


def live_topology(cluster: Cluster, profile: str | Profile = "auto") -> Topology:
    """Reads the nodes that pods may use, their GPUs, and which are free, under the cluster's own
    switches. OrchError (65, 76, 78)."""
    return _topology(read_snapshot(cluster, KubernetesOptions()), profile)


def _topology(snapshot: ClusterSnapshot, profile: str | Profile, gpu: str = "") -> Topology:
    topology = from_nodes(list(snapshot.nodes), profile, gpu)
    return _without_used(structs.replace(topology, name="kubernetes"), snapshot.used)


class _Named(Struct):
    name: str


class _Spec(PodShape, frozen=True, rename="camel"):
    node_name: str = ""


class _Pod(Struct):
    """The fields of `v1.Pod` that say what it takes of its node."""

    metadata: _Named
    spec: _Spec


def _pods(cluster: Cluster) -> Sequence[_Pod]:
    """Reads the pods that have a node and have not ended, of every namespace if that may be read,
    else of our own.

    The list comes from the API server's cache: reading a large cluster's pods from its storage
    takes many seconds. The nodes of other runs are known from their Jobs (`_nodes_of_living_runs`),
    which are read from storage.
    """
    alive = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
    try:
        return cluster.read("AllPods", _Pod, fields=alive, cached=True)
    except OrchError as error:
        if getattr(error, "status", None) != 403:
            raise
        return cluster.read("Pod", _Pod, fields=alive, cached=True)


def _usage(pods: Sequence[_Pod]) -> ClusterSnapshot:
    """Sums up what the pods use, as a snapshot whose nodes have not been read."""
    with_gpus: dict[str, str] = {}
    with_claims: dict[str, str] = {}
    requests: dict[str, dict[str, float]] = {}
    for pod in pods:
        node = pod.spec.node_name
        if not node:
            continue
        node_requests = requests.setdefault(node, {})
        needs = pod_requests(pod.spec)
        for name, amount in needs.items():
            node_requests[name] = node_requests.get(name, 0.0) + amount
        if any(amount and name.endswith("/gpu") for name, amount in needs.items()):
            with_gpus[node] = pod.metadata.name
        if pod.spec.resource_claims:
            with_claims[node] = pod.metadata.name
    return ClusterSnapshot((), with_gpus, requests, with_claims)


def _nodes_of_living_runs(cluster: Cluster) -> dict[str, str]:
    """Node -> the living run that was given it, whether or not its pods exist yet; of every
    namespace whose Jobs may be listed, else of our own."""
    run_by_node: dict[str, str] = {}
    listings = (
        lambda: cluster.list("AllJobs", selector(), absent_ok=True),
        lambda: cluster.list("Job", selector()),
        lambda: cluster.list("JobSet", selector(), absent_ok=True),
    )
    for jobs in gather(listings):
        for job in jobs:
            if not _has_ended(job):
                node_names = (job["metadata"].get("annotations") or {}).get(NODES, "")
                run_by_node |= dict.fromkeys(
                    filter(None, node_names.split(",")),
                    job["metadata"]["name"],
                )
    return run_by_node


def _has_ended(job: Mapping[str, Any]) -> bool:
    conditions = job.get("status", {}).get("conditions") or ()
    return any(
        condition.get("status") == "True"
        and condition.get("type") in ("Complete", "Completed", "Failed")
        for condition in conditions
    )


def _without_used(topology: Topology, pod_by_node: dict[str, str]) -> Topology:
    return _without(topology, {name: f"has pod {pod}" for name, pod in pod_by_node.items()})


def _without(topology: Topology, reasons: Mapping[str, str]) -> Topology:
    """Marks the nodes as not free, each for its reason."""
    machines = dict(topology.machines)
    for name in reasons.keys() & machines.keys():
        machines[name] = structs.replace(
            machines[name],
            free=False,
            reason=reasons[name],
        )
    return structs.replace(topology, machines=machines)
