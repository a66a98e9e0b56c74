"""The API server's objects as the controller's threads read them: TrainRuns, their Jobs and pods,
every node and pod."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from msgspec import field

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.api.watch import Watch
from orchestrator.backends.kubernetes.devices import GpuDevices, read_devices
from orchestrator.backends.kubernetes.names import RUN
from orchestrator.backends.kubernetes.train_run import TrainRun
from orchestrator.cluster.importers import kubernetes as importer
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .observed import Job, Pod

_LISTED_S = 120.0


class _NodeMeta(importer.Meta, frozen=True):
    resource_version: str = field(default="", name="resourceVersion")
    namespace: str = ""


class Node(importer.Node, frozen=True):
    metadata: _NodeMeta


class Store:
    """Watches the objects. `dirty(key)`: called when something of that run has changed;
    `room(node)`: called when free nodes may have changed, with "" if no single node is known.

    `everywhere`: watches all namespaces; else only the cluster's own.
    """

    def __init__(
        self,
        cluster: Cluster,
        dirty: Callable[[str], None],
        room: Callable[[str], None],
        everywhere: bool,
    ):
        self._cluster = cluster
        self._dirty = dirty
        self._room = room
        self._by_run: dict[str, dict[str, Pod]] = {}
        self._lock = threading.Lock()
        self._nodes: tuple[dict[str, Node], frozenset[str]] | None = None
        self._topologies: dict[tuple[str, str], Topology | None] = {}
        kinds = ("AllTrainRuns", "AllJobs", "AllPods") if everywhere else ("TrainRun", "Job", "Pod")
        run_kind, job_kind, pod_kind = kinds
        self.runs = Watch(cluster, run_kind, TrainRun, self._run_changed)
        self.jobs = Watch(cluster, job_kind, Job, self._job_changed, RUN)
        self.pods = Watch(cluster, pod_kind, Pod, self._pod_changed)
        self.nodes = Watch(cluster, "Node", Node, self._node_changed)

    def start(self) -> None:
        """Returns once everything has been listed. OrchError (76) if that takes too long."""
        watches = (self.nodes, self.pods, self.jobs, self.runs)
        for watch in watches:
            watch.start()
        if not all(watch.wait(_LISTED_S) for watch in watches):
            raise OrchError(f"not everything was listed within {_LISTED_S:g} s", Exit.CAPACITY)

    def stop(self) -> None:
        for watch in (self.nodes, self.pods, self.jobs, self.runs):
            watch.stop()

    def nodes_now(self) -> tuple[dict[str, Node], frozenset[str]]:
        """Returns all nodes by name, and the names of those that answer. Callers must not change
        them."""
        with self._lock:
            if self._nodes is None:
                nodes = {node.metadata.name: node for node in self.nodes.all()}
                ready = frozenset(name for name, node in nodes.items() if _ready(node) == "True")
                self._nodes = (nodes, ready)
                self._topologies.clear()
            return self._nodes

    def topology(self, profile: str | importer.Profile, gpu: str) -> Topology | None:
        """Returns the topology of all nodes; None if there are none, or their labels contradict
        each other."""
        nodes, _ = self.nodes_now()
        key = (repr(profile), gpu)
        if key not in self._topologies:
            topology = None
            with contextlib.suppress(OrchError):
                topology = importer.from_nodes(list(nodes.values()), profile, gpu)
            self._topologies[key] = topology
        return self._topologies[key]

    def pods_of(self, run: str) -> list[Pod]:
        with self._lock:
            return list(self._by_run.get(run, {}).values())

    def devices(self) -> GpuDevices:
        """Reads now which GPUs ResourceClaims may get and hold. OrchError (76, 78)."""
        return read_devices(self._cluster)

    def job_of(self, run: TrainRun, name: str) -> Job | None:
        """Returns the run's Job, but not one of the same name that belongs to something else."""
        job = self.jobs.get(f"{run.metadata.namespace}/{name}")
        return job if job is not None and job.run == run.key else None

    # ----------------------------------------------------------------------------- watching threads

    def _run_changed(
        self,
        key: str,
        before: TrainRun | None,
        after: TrainRun | None,
    ) -> None:
        self._dirty(key)
        if after is None or before is None:
            self._room("")

    def _job_changed(self, key: str, before: Job | None, after: Job | None) -> None:
        if run := (after or before).run:  # type: ignore[union-attr]  # one of them exists
            self._dirty(run)

    def _pod_changed(self, key: str, before: Pod | None, after: Pod | None) -> None:
        pod = after or before
        assert pod is not None
        if run := pod.run:
            with self._lock:
                run_pods = self._by_run.setdefault(run, {})
                if after is None:
                    run_pods.pop(key, None)
                    if not run_pods:
                        del self._by_run[run]
                else:
                    run_pods[key] = after
            self._dirty(run)
            return
        # a pod of something else may have come to a node, or left it
        ended = after is None or after.ended
        if ended or before is None or before.spec.node_name != pod.spec.node_name:
            self._room("")

    def _node_changed(self, key: str, before: Node | None, after: Node | None) -> None:
        if before is None or after is None or _matters(before) != _matters(after):
            with self._lock:
                self._nodes = None
            self._room(key)


def _matters(node: Node) -> tuple[object, ...]:
    """Returns the fields of a node that placement depends on: not the heartbeats' times."""
    metadata = node.metadata
    return metadata.labels, metadata.annotations, node.spec, node.status.allocatable, _ready(node)


def _ready(node: Node) -> str:
    return next((c.status for c in node.status.conditions if c.type == "Ready"), "")
