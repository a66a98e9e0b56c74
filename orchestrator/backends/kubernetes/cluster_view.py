"""The cluster as it is now: nodes for a plan, and the topology that `cluster=kubernetes` plans
on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

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
    # hostname labels of nodes that are left out; None: not known
    excluded: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: (
        None
    )  # before and after the Job is sent: OrchError (76) if it came too late


class NoNodes(OrchError):
    """The cluster has no nodes, yet: it may grow them when pods ask."""


class ClusterSnapshot(Struct, frozen=True):
    """The nodes, and which of them hold pods with GPUs."""

    nodes: Sequence[Node]
    used: dict[str, str] = {}
    requests: dict[str, dict[str, float]] = {}  # node -> what its pods ask for, all together
    claims: dict[str, str] = {}  # node -> a pod that asks for devices by a claim
    devices: GpuDevices | None = None  # None: nobody asks for GPUs by a claim


def read_snapshot(
    cluster: Cluster, options: KubernetesOptions, used_too: bool = True
) -> ClusterSnapshot:
    """What `reserve_nodes` starts from. `used_too`: which nodes have GPUs in use; a queue looks
    after that itself.

    OrchError (76, 78), NoNodes.
    """
    wanted = ",".join(f"{key}={value}" for key, value in sorted(options.node_selector.items()))
    pods = in_background(lambda: _pods(cluster)) if used_too else None
    devices = in_background(lambda: read_devices(cluster)) if asks_by_claim(options) else None
    nodes = cluster.read("Node", Node, wanted, cached=True)
    if not nodes:
        raise NoNodes(
            f"the cluster has no nodes{f' with the labels {wanted}' if wanted else ''}",
            Exit.CAPACITY,
        )
    used = _used(pods.result() if pods else ())
    return structs.replace(used, nodes=nodes, devices=devices.result() if devices else None)


@contextlib.contextmanager
def reserve_nodes(
    cluster: Cluster,
    plan: Plan,
    options: KubernetesOptions,
    run_id: str,
    snapshot: Future[ClusterSnapshot] | None = None,
) -> Iterator[Reservation]:
    """The topology, and without a queue the nodes for the plan. The body creates the Job.

    All or nothing: nodes that a living run was given are not given again, and one submitter in a
    namespace at a time chooses and creates (placement_lock.py), so no two runs ever wait for each
    other's nodes. `snapshot`: one that is being read since before, while the plan was made.
    OrchError (76) when too few nodes are free.
    """
    check_levels(plan, options)
    check_queue(cluster, options)
    queue_places = not places_itself(options) or plan.cluster.device == "cpu"
    try:
        view = snapshot.result() if snapshot else read_snapshot(cluster, options, not queue_places)
        gpu = options.gpu_resource if plan.cluster.device == "cuda" else ""
        needs = pod_needs(plan, options)
        if gpu and gpu not in needs.requests:
            view = _with_claimed(view, gpu)
        workers = gpu_nodes(view.nodes, gpu)
        picked = pick_profile(workers, profile(options))
        topology = _topology(view, picked, gpu)
    except NoNodes as error:
        if not queue_places:
            raise
        yield Reservation(warnings=(f"{error.message} yet: placed without knowing the network",))
        return
    except OrchError as error:
        if getattr(error, "status", None) != 403:
            raise
        text = f"nodes cannot be read ({error.message}): placed without knowing the network"
        yield Reservation(warnings=(text,))
        return
    excluded = {node.metadata.name for node in view.nodes if is_excluded(node, options)}
    hosts = {
        node.metadata.name: node.metadata.labels.get(HOST, node.metadata.name)
        for node in view.nodes
    }
    left_out = tuple(hosts[name] for name in sorted(excluded))
    if queue_places:
        yield Reservation(topology, excluded=left_out)
        return
    with placement_lock(cluster, run_id) as check:
        topology = _fitting(_without(topology, dict.fromkeys(excluded, EXCLUDED)), view, needs)
        topology = _without_used(topology, _nodes_of_living_runs(cluster))
        labels = dict(options.levels) or tier_labels(workers, picked)
        chosen = choose(plan, topology, labels, hosts)
        known = topology if labels or picked.annotation else structs.replace(topology, tiers=())
        yield Reservation(topology, chosen, left_out, _split_warning(plan, chosen, known), check)


def _with_claimed(view: ClusterSnapshot, gpu: str) -> ClusterSnapshot:
    """The cluster for pods that ask for their GPUs by a claim: who has devices, and who holds some
    of them."""
    devices = view.devices or NOT_READ
    held = view.claims if devices.held is None else devices.held
    return structs.replace(
        view, nodes=with_devices(view.nodes, gpu, devices), used=view.used | held
    )


def _fitting(topology: Topology, view: ClusterSnapshot, needs: PodNeeds) -> Topology:
    """Free is what the scheduler would take for a pod of the run: taints that it tolerates do not
    matter."""
    machines = dict(topology.machines)
    for node in view.nodes:
        name = node.metadata.name
        machine = machines[name]
        if machine.free or machine.reason.startswith("taint "):
            why = why_not(node, needs, view.requests.get(name, {}))
            machines[name] = structs.replace(machine, free=not why, reason=why)
    return structs.replace(topology, machines=machines)


def _split_warning(plan: Plan, chosen: ChosenNodes, topology: Topology) -> tuple[str, ...]:
    """What the plan loses where pipelines do not find room under one switch, or no label says where
    switches are."""
    split, units = split_units(plan, chosen.nodes, topology)
    if not split:
        return ()
    from orchestrator.cluster.nodes import with_nodes
    from orchestrator.planner.elastic.replan import (
        difference,
        replan,
    )  # numpy, which other submissions do without

    real = replan(
        plan, with_nodes(plan.cluster, chosen.nodes, structs.replace(topology, machines={}))
    )
    if (cost := difference(plan, real).cost) < 0.0005:
        return ()
    what = (
        f"under one {topology.tiers[0].name}"
        if topology.tiers
        else "together: no label says what the network is"
    )
    return (f"{split} of {units} units of the plan do not lie {what}; predicted step {cost:+.1%}",)


def check_queue(cluster: Cluster, options: KubernetesOptions) -> None:
    """OrchError (65) for a queue or priority that the cluster does not have: Kueue would keep the
    run waiting for it.

    Not checked where they may not be listed; then `orch status` shows what Kueue writes of the run.
    """
    if options.queue is None:
        return
    for option, kind in (("queue", "LocalQueue"), ("workload_priority", "WorkloadPriorityClass")):
        name = getattr(options, option)
        known = _names(cluster, kind) if name is not None else None
        if known is not None and name not in known:
            where = f" in namespace {cluster.namespace}" if kind == "LocalQueue" else ""
            hint = did_you_mean(name, known) if known else "there is none"
            raise OrchError(
                f"backend.options.{option}: no {kind} {name!r}{where}; {hint}", Exit.CONFIG
            )


def _names(cluster: Cluster, kind: str) -> list[str] | None:
    """Of Kueue's objects of a kind; None where they may not be listed. OrchError (65) when the
    cluster has no Kueue."""
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
    """Labels of the levels, if they are named, innermost first as in the plan; else a profile by
    its name."""
    if options.levels:
        return Profile(levels={name: [label] for name, label in reversed(options.levels.items())})
    return profile_named(options.profile)


def profile_named(text: str) -> str | Profile:
    """A shipped profile by its name, or labels: `zone=LABEL,rack=LABEL`, coarse to fine."""
    return profile_of(text) if "=" in text else text


def live_topology(cluster: Cluster, profile: str | Profile = "auto") -> Topology:
    """Nodes that pods may go to, GPUs, and what is free of them under the cluster's own switches.
    OrchError (65, 76,
    78)."""
    return _topology(read_snapshot(cluster, KubernetesOptions()), profile)


def _topology(view: ClusterSnapshot, profile: str | Profile, gpu: str = "") -> Topology:
    return _without_used(
        structs.replace(from_nodes(list(view.nodes), profile, gpu), name="kubernetes"), view.used
    )


class _Named(Struct):
    name: str


class _Spec(PodShape, frozen=True, rename="camel"):
    node_name: str = ""


class _Pod(Struct):
    """The fields of `v1.Pod` that tell what it takes of its node."""

    metadata: _Named
    spec: _Spec


def _pods(cluster: Cluster) -> Sequence[_Pod]:
    """Pods that have a node and have not ended, of any namespace if that may be read, else of our
    own.

    As the API server remembers them: a list of a large cluster's pods out of its storage takes it
    many seconds. What other runs were given is known by their Jobs (`_nodes_of_living_runs`), which
    are read as they are.
    """
    alive = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
    try:
        return cluster.read("AllPods", _Pod, fields=alive, cached=True)
    except OrchError as error:
        if getattr(error, "status", None) != 403:
            raise
        return cluster.read("Pod", _Pod, fields=alive, cached=True)


def _used(pods: Sequence[_Pod]) -> ClusterSnapshot:
    """What the pods have of nodes that are not known yet."""
    with_gpus: dict[str, str] = {}
    with_claims: dict[str, str] = {}
    requests: dict[str, dict[str, float]] = {}
    for pod in pods:
        if node := pod.spec.node_name:
            there = requests.setdefault(node, {})
            needs = pod_requests(pod.spec)
            for name, amount in needs.items():
                there[name] = there.get(name, 0.0) + amount
            if any(amount and name.endswith("/gpu") for name, amount in needs.items()):
                with_gpus[node] = pod.metadata.name
            if pod.spec.resource_claims:
                with_claims[node] = pod.metadata.name
    return ClusterSnapshot((), with_gpus, requests, with_claims)


def _nodes_of_living_runs(cluster: Cluster) -> dict[str, str]:
    """Node -> living run that was given it, whether or not its pods are there yet; of every
    namespace whose Jobs may be listed, else of our own."""
    found: dict[str, str] = {}
    kinds = (
        lambda: cluster.list("AllJobs", selector(), absent_ok=True),
        lambda: cluster.list("Job", selector()),
        lambda: cluster.list("JobSet", selector(), absent_ok=True),
    )
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


def _without_used(topology: Topology, taken: dict[str, str]) -> Topology:
    return _without(topology, {name: f"has pod {pod}" for name, pod in taken.items()})


def _without(topology: Topology, why: Mapping[str, str]) -> Topology:
    machines = {
        name: structs.replace(machine, free=False, reason=why[name]) if name in why else machine
        for name, machine in topology.machines.items()
    }
    return structs.replace(topology, machines=machines)
