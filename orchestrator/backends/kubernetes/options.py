"""`backend.options` of the kubernetes backend: what differs from cluster to cluster. Pure.

Single ones are overridden as everything else: `backend.options.queue=research`. What is left out
follows from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from orchestrator.backends.base import decode_options
from orchestrator.plan.document import Frozen

#: Names and label keys as the API server itself takes them (DNS-1123 labels and subdomains,
#: qualified names).
Label = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z")]
_PART = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
Key = Annotated[str, Meta(pattern=rf"^([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_PART}\Z")]
Value = Annotated[str, Meta(pattern=rf"^({_PART})?\Z")]
Path = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f:]{0,1000}\Z")]
Image = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}\Z")]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Toleration(Frozen):
    key: Key | None = None  # None with operator Exists: every taint
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Value = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = ""


class Volume(Frozen):
    """A claim that every pod mounts in addition to the run's own: data, a shared environment."""

    claim: Name
    path: Path
    read_only: bool = True


class Egress(Frozen):
    """Addresses outside of the run that its pods may reach: a data store, a registry of models."""

    cidr: Annotated[str, Meta(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}\Z")]
    ports: list[Annotated[int, Meta(ge=1, le=65535)]] = []  # TCP; none: all


class Owner(Frozen):
    """A ConfigMap whose end is the run's end: Kubernetes collects what it owns. The chart has one
    for each run."""

    name: Name
    uid: str = ""  # "": asked for when submitting


class KubernetesOptions(Frozen):
    """Every option with its default."""

    # where
    context: Annotated[str, Meta(max_length=253)] | None = (
        None  # of the kubeconfig; None: the current one
    )
    # None: that of the context, or the launcher's own inside a cluster
    namespace: Label | None = None
    kind: Literal["job", "jobset"] = "job"
    # submit to charts/orch-controller; auto: where it is
    controller: Literal["auto", "always", "never"] = "auto"
    # with what
    image: Image | None = None  # has this orch and torch; the Containerfile builds one
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: list[Name] = []
    python: Annotated[str, Meta(min_length=1, max_length=255)] = "python3"  # of the image
    service_account: Name | None = None  # of the pods; they never get its token
    user: Count = 10001  # uid and gid of the processes
    # how much, for one pod
    cpus: Positive | None = None  # None: 8 a GPU, 1 a process on CPU clusters
    memory_gib: Positive | None = None  # without /dev/shm; None: 64 a GPU, 2 a process
    # /dev/shm, counted in the memory limit; None: 4 a GPU, 0.25 a process
    shm_gib: Positive | None = None
    gpu_resource: Key = "nvidia.com/gpu"
    rdma: dict[
        Key, Count
    ] = {}  # in requests and limits, e.g. {rdma/ib: 8}; without it NCCL uses sockets
    # baseline: with IPC_LOCK, which RDMA may need
    security: Literal["restricted", "baseline"] = "restricted"
    # queueing
    queue: Name | None = None  # Kueue's LocalQueue; None: no Kueue
    workload_priority: Name | None = None  # Kueue's WorkloadPriorityClass
    priority_class: Name | None = None  # PriorityClass of the pods
    # without Kueue: all pods or none by a scheduler of the cluster (objects/gang.py); auto: the
    # first that it has
    gang: Literal["none", "auto", "workload", "volcano", "kai", "coscheduling"] = "none"
    gang_queue: Name | None = None  # of Volcano or KAI
    # on which nodes
    profile: Annotated[str, Meta(max_length=2000)] = (
        "auto"  # of node labels: `orch topology import --profile`
    )
    levels: dict[str, Key] = {}  # level of the plan -> node label, e.g. {leaf: example.org/leaf}
    # how strongly the whole job stays together
    topology: Literal["preferred", "required", "none"] = "preferred"
    # keep each TP/EP domain or pipeline under one switch of the innermost level
    slices: bool = True
    node_selector: dict[Key, Value] = {}
    tolerations: list[Toleration] = []
    exclude: list[Name] = []  # nodes that no pod may go to, by name or hostname label
    bad_nodes: list[
        Name
    ] = []  # nor to these, which orch fills in: those of `orch nodes` at each start
    # volumes
    # PVC for the run folder: checkpoints, logs, history; None: gone with its pods
    claim: Name | None = None
    volumes: list[Volume] = []
    # time limits, retries
    unreachable_s: Natural = 30  # after which pods leave a node that has gone silent
    # a pod waits this long for all others, then gives its node back
    rendezvous_timeout_s: Positive = 1800.0
    # an elastic run takes more nodes in no sooner than its nodes have stayed this long
    grow_after_s: Natural = 60
    max_pod_failures: Natural = 16  # counted ones: not disruptions, not exit 75
    # uncounted ones of a pod that has then waited for others in vain: the run ends (76)
    max_pod_returns: Natural = 10
    # what one node writes to the claim; to size the grace period
    checkpoint_gb_per_s: Positive = 1.0
    # a finished run is removed from the cluster after this long; None: never
    ttl_s: Natural | None = 604800
    # names on everything
    labels: dict[Key, Value] = {}
    annotations: dict[Key, Annotated[str, Meta(max_length=4096)]] = {}
    # anything else of the pod, merged as `kubectl patch` does (objects/pod_patch.py): {spec:
    # {runtimeClassName: x}}
    pod: dict[str, Any] = {}
    network_policy: bool = False  # only its pods reach one another, and any pod their metrics
    # with it: its pods reach one another, DNS and these alone; None: anybody
    egress: list[Egress] | None = None
    owner: Owner | None = None

    @property
    def without(self) -> list[str]:
        """All nodes that no pod may go to."""
        return [*self.exclude, *(node for node in self.bad_nodes if node not in self.exclude)]


def places_itself(options: KubernetesOptions) -> bool:
    """Whether nodes are chosen for the run, and not by a queue or by a scheduler of gangs."""
    return options.queue is None and options.gang == "none"


_RENAMED = {"gather_timeout_s": "rendezvous_timeout_s"}  # as runs and values of before call it


def read_options(options: Mapping[str, Any]) -> KubernetesOptions:
    """Strict: an unknown key is refused with the nearest legal one, a wrong type with its place
    (exit 65)."""
    renamed = {_RENAMED.get(name, name): value for name, value in options.items()}
    return decode_options(renamed, KubernetesOptions, "kubernetes")
