"""What the API server has, as the controller's threads read it: TrainRuns, their Jobs and pods,
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
    """`dirty(key)`: something of that run has changed; `room(node)`: where runs may be placed has,
    "" without a node of which it is known.

    everywhere: of all namespaces; else of the cluster's own alone.
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
        every = "All" if everywhere else ""
        kinds = {
            "TrainRun": f"{every}TrainRuns" if every else "TrainRun",
            "Job": f"{every}Jobs" if every else "Job",
        }
        self.runs = Watch(cluster, kinds["TrainRun"], TrainRun, self._run_changed)
        self.jobs = Watch(cluster, kinds["Job"], Job, self._job_changed, RUN)
        self.pods = Watch(cluster, "AllPods" if every else "Pod", Pod, self._pod_changed)
        self.nodes = Watch(cluster, "Node", Node, self._node_changed)

    def start(self) -> None:
        """Returns when everything has been listed. OrchError (76) when that takes too long."""
        watches = (self.nodes, self.pods, self.jobs, self.runs)
        for watch in watches:
            watch.start()
        if not all(watch.wait(_LISTED_S) for watch in watches):
            raise OrchError(f"not everything was listed within {_LISTED_S:g} s", Exit.CAPACITY)

    def stop(self) -> None:
        for watch in (self.nodes, self.pods, self.jobs, self.runs):
            watch.stop()

    def nodes_now(self) -> tuple[dict[str, Node], frozenset[str]]:
        """All nodes by name, and which of them answer. Not to be changed."""
        with self._lock:
            if self._nodes is None:
                found = {node.metadata.name: node for node in self.nodes.all()}
                self._nodes = (
                    found,
                    frozenset(name for name, node in found.items() if _ready(node) == "True"),
                )
                self._topologies.clear()
            return self._nodes

    def topology(self, profile: str | importer.Profile, gpu: str) -> Topology | None:
        """Of all nodes; None where there are none, or their labels contradict each other."""
        nodes = list(self.nodes_now()[0].values())
        key = (repr(profile), gpu)
        if key not in self._topologies:
            found = None
            with contextlib.suppress(OrchError):
                found = importer.from_nodes(list(nodes), profile, gpu)
            self._topologies[key] = found
        return self._topologies[key]

    def pods_of(self, run: str) -> list[Pod]:
        with self._lock:
            return list(self._by_run.get(run, {}).values())

    def devices(self) -> GpuDevices:
        """GPUs that are asked for by claims, read now. OrchError (76, 78)."""
        return read_devices(self._cluster)

    def job_of(self, run: TrainRun, name: str) -> Job | None:
        """Its Job, not one of the same name that is somebody else's."""
        job = self.jobs.get(f"{run.metadata.namespace}/{name}")
        return job if job is not None and job.run == run.key else None

    # ----------------------------------------------------------------------------- watching threads

    def _run_changed(self, key: str, before: TrainRun | None, after: TrainRun | None) -> None:
        self._dirty(key)
        if after is None or before is None:
            self._room("")

    def _job_changed(self, key: str, before: Job | None, after: Job | None) -> None:
        if run := (after or before).run:  # type: ignore[union-attr]  # one of them is there
            self._dirty(run)

    def _pod_changed(self, key: str, before: Pod | None, after: Pod | None) -> None:
        one = after or before
        assert one is not None
        if run := one.run:
            with self._lock:
                known = self._by_run.setdefault(run, {})
                if after is None:
                    known.pop(key, None)
                    if not known:
                        del self._by_run[run]
                else:
                    known[key] = after
            self._dirty(run)
        elif (
            after is None
            or after.ended
            or before is None
            or before.spec.node_name != after.spec.node_name
        ):
            self._room("")  # somebody else's has come to a node, or left it

    def _node_changed(self, key: str, before: Node | None, after: Node | None) -> None:
        if before is None or after is None or _matters(before) != _matters(after):
            with self._lock:
                self._nodes = None
            self._room(key)


def _matters(node: Node) -> tuple[object, ...]:
    """What of a node placement depends on: not the heartbeats' times."""
    about = node.metadata
    return about.labels, about.annotations, node.spec, node.status.allocatable, _ready(node)


def _ready(node: Node) -> str:
    return next((c.status for c in node.status.conditions if c.type == "Ready"), "")
