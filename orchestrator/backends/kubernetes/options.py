"""`backend.options` of the kubernetes backend: what differs from cluster to cluster. Pure.

Single options are overridden like all others: `backend.options.queue=research`. Options that are
left out follow from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from orchestrator.backends.base import decode_options
from orchestrator.plan.document import Frozen

#: Names and label keys as the API server itself accepts them (DNS-1123 labels and subdomains,
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
    key: Key | None = None  # the taint's key; None with operator Exists: every taint
    #: Exists: any value of the key; Equal: `value` alone
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Value = ""  # the taint's value
    #: the taint's effect; "": every effect
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = ""


class Volume(Frozen):
    """A claim that every pod mounts in addition to the run's own, for data or a shared
    environment."""

    claim: Name  # name of the claim, in the run's namespace
    path: Path  # where pods mount it
    read_only: bool = True  # whether pods may only read it


class Egress(Frozen):
    """Addresses outside the run that its pods may reach, such as a data store or a registry of
    models."""

    #: the addresses, such as 10.9.0.0/16
    cidr: Annotated[str, Meta(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}\Z")]
    ports: list[Annotated[int, Meta(ge=1, le=65535)]] = []  # TCP ports; none: all


class Owner(Frozen):
    """A ConfigMap whose deletion ends the run, because Kubernetes collects what it owns. The chart
    has one per run."""

    name: Name  # name of the ConfigMap
    uid: str = ""  # "": looked up when submitting


class KubernetesOptions(Frozen):
    """Every option with its default."""

    # cluster
    #: context of the kubeconfig; None: the current one
    context: Annotated[str, Meta(max_length=253)] | None = None
    #: where the objects go; None: the context's, or the launcher's own inside a cluster
    namespace: Label | None = None
    kind: Literal["job", "jobset"] = "job"  # what holds the pods; jobset needs its controller
    #: submit to charts/orch-controller; auto: if it is installed
    controller: Literal["auto", "always", "never"] = "auto"
    # image and user
    image: Image | None = None  # contains this orch and torch; the Containerfile builds one
    #: when nodes pull the image
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: list[Name] = []  # Secrets with the registry's credentials
    python: Annotated[str, Meta(min_length=1, max_length=255)] = "python3"  # in the image
    service_account: Name | None = None  # the pods', which never get its token
    user: Count = 10001  # uid and gid of the processes
    # how much, for one pod
    cpus: Positive | None = None  # cores of a pod; None: 8 per GPU, 1 per process on CPUs
    #: of a pod, without /dev/shm; None: 64 per GPU, 2 per process
    memory_gib: Positive | None = None
    #: /dev/shm, counted in the memory limit; None: 4 per GPU, 0.25 per process
    shm_gib: Positive | None = None
    gpu_resource: Key = "nvidia.com/gpu"  # the extended resource that counts GPUs
    #: in requests and limits, e.g. {rdma/ib: 8}; without it NCCL uses sockets
    rdma: dict[Key, Count] = {}
    #: baseline: with IPC_LOCK, which RDMA may need
    security: Literal["restricted", "baseline"] = "restricted"
    # queueing
    queue: Name | None = None  # Kueue's LocalQueue; None: no Kueue
    workload_priority: Name | None = None  # Kueue's WorkloadPriorityClass
    priority_class: Name | None = None  # PriorityClass of the pods
    #: without Kueue: a scheduler of the cluster places all pods or none (objects/gang.py); auto:
    #: the first one that the cluster has
    gang: Literal["none", "auto", "workload", "volcano", "kai", "coscheduling"] = "none"
    gang_queue: Name | None = None  # queue of Volcano or KAI
    # nodes
    #: profile of node labels: `orch topology import --profile`
    profile: Annotated[str, Meta(max_length=2000)] = "auto"
    levels: dict[str, Key] = {}  # level of the plan -> node label, e.g. {leaf: example.org/leaf}
    #: how strongly the whole job is kept together
    topology: Literal["preferred", "required", "none"] = "preferred"
    #: keep each TP/EP domain or pipeline under one switch of the innermost level
    slices: bool = True
    node_selector: dict[Key, Value] = {}  # labels that the pods' nodes must have
    #: taints that the pods tolerate, in addition to those of GPUs
    tolerations: list[Toleration] = []
    exclude: list[Name] = []  # nodes that no pod may use, by name or hostname label
    #: neither these, which orch fills in at each start from `orch nodes`
    bad_nodes: list[Name] = []
    # volumes
    #: PVC for the run folder: checkpoints, logs, history; None: the folder goes with the pods
    claim: Name | None = None
    volumes: list[Volume] = []  # further claims to mount
    # time limits, retries
    unreachable_s: Natural = 30  # after which pods leave an unresponsive node
    #: how long a pod waits for all others before it gives its node back
    rendezvous_timeout_s: Positive = 1800.0
    #: how long an elastic run's nodes must be unchanged before it takes in more
    grow_after_s: Natural = 60
    max_pod_failures: Natural = 16  # counted failures: not disruptions, not exit 75
    #: uncounted failures of a pod; if it then waits for others in vain, the run ends (76)
    max_pod_returns: Natural = 10
    #: write rate of one node to the claim, from which the grace period follows
    checkpoint_gb_per_s: Positive = 1.0
    #: how long a finished run stays in the cluster; None: forever
    ttl_s: Natural | None = 604800
    # names on everything
    labels: dict[Key, Value] = {}  # labels of every object of the run
    #: annotations of every object of the run
    annotations: dict[Key, Annotated[str, Meta(max_length=4096)]] = {}
    #: any other field of the pod, merged as `kubectl patch` does (objects/pod_patch.py): {spec:
    #: {runtimeClassName: x}}
    pod: dict[str, Any] = {}
    #: only the run's pods reach its pods; any pod reaches their metrics
    network_policy: bool = False
    #: with network_policy: its pods reach only one another, DNS and these; None: no limit
    egress: list[Egress] | None = None
    owner: Owner | None = None  # the object whose deletion ends the run

    @property
    def without(self) -> list[str]:
        """All nodes that no pod may use."""
        return [*self.exclude, *(node for node in self.bad_nodes if node not in self.exclude)]


def places_itself(options: KubernetesOptions) -> bool:
    """Tells whether orch chooses the run's nodes itself, not a queue or a gang scheduler."""
    return options.queue is None and options.gang == "none"


_RENAMED = {"gather_timeout_s": "rendezvous_timeout_s"}  # names of earlier versions


def read_options(options: Mapping[str, Any]) -> KubernetesOptions:
    """Reads the options strictly: an unknown key is refused with the nearest legal one, a wrong
    type with its place (exit 65)."""
    renamed = {_RENAMED.get(name, name): value for name, value in options.items()}
    return decode_options(renamed, KubernetesOptions, "kubernetes")
