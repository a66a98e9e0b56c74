"""The pod of one agent: what runs, with what, as whom, and what its exit code means for the Job.
Pure.

Every default meets Pod Security's `restricted` level. No field that a process can find out or set
for itself: the API server, the scheduler and every watcher read each of them again whenever one of
512 pods changes.

Sources: https://kubernetes.io/docs/concepts/security/pod-security-standards/ ; NCCL over
InfiniBand: conventions of the NVIDIA GPU and network operators (GPU and RDMA resources in requests
and limits, else NCCL silently uses sockets).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

from orchestrator import start
from orchestrator.backends.kubernetes.names import (
    CONTAINER,
    INPUT,
    METRICS_PORT,
    OWN_FIELDS,
    ROOT,
    RUNS,
)
from orchestrator.backends.kubernetes.options import KubernetesOptions, Toleration, places_itself
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import FATAL, Exit
from orchestrator.planner.placement.rank_assignment import save_seconds, used_node_count

from .node_affinity import ChosenNodes, both_spellings, node_affinity, without_hosts
from .pod_patch import patched

# between the last worker's end and the kubelet's SIGKILL: its agent's termination message
MARGIN_S = 30


def grace_seconds(plan: Plan, options: KubernetesOptions, wanted_s: float) -> int:
    """Seconds for workers to save after a notice: at least `wanted_s`, and a fifth more than a save
    is expected to take."""
    return ceil(max(wanted_s, 1.2 * save_seconds(plan, options.checkpoint_gb_per_s)))


def pod_template(
    name: str,
    plan: Plan,
    options: KubernetesOptions,
    grace_s: int,
    labels: dict[str, str],
    annotations: dict[str, str],
    chosen: ChosenNodes | None,
    subdomain: bool,
    excluded: Sequence[str] | None = None,
) -> dict[str, Any]:
    """`spec.template` of the Job. `grace_s`: what the agent gives its workers; the kubelet gives
    MARGIN_S more.

    `excluded`: hostname labels of the nodes of `options.without`; None: nobody has looked them up.
    """
    spec: dict[str, Any] = {
        "restartPolicy": "Never",  # podFailurePolicy decides, by the exit code
        "terminationGracePeriodSeconds": grace_s + MARGIN_S,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(options),
        "tolerations": tolerations(plan, options),
        "containers": [_container(plan, options)],
        "volumes": _volumes(name, plan, options),
    }
    if subdomain:
        spec["subdomain"] = name
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in options.pull_secrets]
    if options.node_selector:
        spec["nodeSelector"] = dict(options.node_selector)
    if chosen is not None:
        spec["affinity"] = node_affinity(chosen)
    if hosts := both_spellings(options.without) if excluded is None else excluded:
        spec["affinity"] = without_hosts(spec.get("affinity", {}), hosts)
    if plan.cluster.device == "cpu" and used_node_count(plan) > 1:
        spec["topologySpreadConstraints"] = [
            _spread(labels)
        ]  # a GPU pod has its node to itself anyway
    template = {
        "metadata": {"labels": labels, "annotations": _annotations() | annotations},
        "spec": spec,
    }
    return patched(template, options.pod, in_queue=not places_itself(options))


def _annotations() -> dict[str, str]:
    return {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "sidecar.istio.io/inject": "false",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(METRICS_PORT),  # the path is what scrapers take by default
    }


def _spread(labels: dict[str, str]) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }


def tolerations(plan: Plan, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Of GPU nodes' taint, and of a silent node for `unreachable_s` instead of the default five
    minutes."""
    found = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": options.unreachable_s}
        for key in ("not-ready", "unreachable")
    ]
    if plan.cluster.device == "cuda":
        found.append({"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    return [*found, *map(_toleration, options.tolerations)]


def _toleration(given: Toleration) -> dict[str, Any]:
    pairs = {
        "key": given.key,
        "operator": given.operator,
        "value": given.value,
        "effect": given.effect,
    }
    return {name: value for name, value in pairs.items() if value}


# ------------------------------------------------------------------------------------------
#     container


def _container(plan: Plan, options: KubernetesOptions) -> dict[str, Any]:
    mounts = [
        {"name": "work", "mountPath": ROOT},
        {"name": "work", "mountPath": "/tmp"},  # the root file system is read only
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "input", "mountPath": INPUT, "readOnly": True},
    ]
    if options.claim:
        mounts.insert(1, {"name": "runs", "mountPath": RUNS})
    for index, volume in enumerate(options.volumes):
        mounts.append(
            {"name": f"data-{index}", "mountPath": volume.path, "readOnly": volume.read_only}
        )
    return {
        "name": CONTAINER,
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        "command": [
            options.python,
            "-uP",
            *start.BY_NAME,
            "orchestrator.kubernetes.task",
        ],  # exec form: it is pid 1
        "env": _fields(),
        "ports": [
            {"name": "metrics", "containerPort": METRICS_PORT}
        ],  # who scrapes looks for the name
        "resources": resources(plan, options),
        "securityContext": _container_security(options),
        "volumeMounts": mounts,
    }


def _fields() -> list[dict[str, Any]]:
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in OWN_FIELDS.items()
    ]


def resources(plan: Plan, options: KubernetesOptions) -> dict[str, Any]:
    """Requests and limits of one pod. No limit on CPUs: throttling a data loader stalls every other
    node."""
    memory = quantity(sum(memory_gib(plan, options)))
    devices = {name: str(count) for name, count in options.rdma.items()}
    if plan.cluster.device == "cuda":
        devices = {options.gpu_resource: str(plan.cluster.gpus_per_node), **devices}
    cpus = options.cpus or plan.cluster.gpus_per_node * (8 if plan.cluster.device == "cuda" else 1)
    requests = {"cpu": f"{round(cpus * 1000)}m", "memory": memory, **devices}
    return {"requests": requests, "limits": {"memory": memory, **devices}}


def memory_gib(plan: Plan, options: KubernetesOptions) -> tuple[float, float]:
    """(memory of the processes, /dev/shm): what is in /dev/shm counts against the container's limit
    too."""
    gpus = plan.cluster.gpus_per_node
    cuda = plan.cluster.device == "cuda"
    memory = options.memory_gib or gpus * (64 if cuda else 2)
    return memory, options.shm_gib or gpus * (4 if cuda else 0.25)


def quantity(gib: float) -> str:
    """GiB as Kubernetes writes it, rounded up to a MiB: 4 -> 4Gi, 0.5 -> 512Mi."""
    mib = ceil(gib * 1024)
    return f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"


def _volumes(name: str, plan: Plan, options: KubernetesOptions) -> list[dict[str, Any]]:
    shm = {"medium": "Memory", "sizeLimit": quantity(memory_gib(plan, options)[1])}
    sources = [{"configMap": {"name": name}}, {"secret": {"name": name}}]
    volumes: list[dict[str, Any]] = [
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": shm},
        {"name": "input", "projected": {"defaultMode": 0o440, "sources": sources}},
    ]
    if options.claim:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}})
    for index, volume in enumerate(options.volumes):
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        volumes.append({"name": f"data-{index}", "persistentVolumeClaim": claim})
    return volumes


# ------------------------------------------------------------------------------------------
#     security


def _pod_security(options: KubernetesOptions) -> dict[str, Any]:
    """`baseline` runs as root: a capability that is added reaches no other user's processes."""
    user = options.user if options.security == "restricted" else 0
    found: dict[str, Any] = {
        "runAsNonRoot": options.security == "restricted",
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if (
        options.claim or options.volumes
    ):  # else nothing outlives the pod, so nothing has another owner
        found["fsGroupChangePolicy"] = "OnRootMismatch"
    return found


def _container_security(options: KubernetesOptions) -> dict[str, Any]:
    added = {"add": ["IPC_LOCK"]} if options.security == "baseline" else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **added},
    }


# --------------------------------------------------------------------------------------- exit codes

#: Exit codes of an agent whose run cannot be helped by starting it again. USER and INTERNAL are
#: among them because the agents have tried again themselves: `backend.max_restarts` is theirs to
#: count; CAPACITY, because pods leave with it only after `max_pod_returns`.
FINAL = tuple(sorted({*map(int, FATAL), int(Exit.USER), int(Exit.INTERNAL), int(Exit.CAPACITY)}))


def pod_failure_policy() -> dict[str, Any]:
    """Rules in order, the first match wins (batch/v1 PodFailurePolicy; needs restartPolicy Never).

    A disruption (preemption, drain, eviction, lost node) is not counted. Nor is 75: a pod that was
    told to leave, or that has waited for others in vain, of which there are as many as pods
    whenever one of them finds no node. All else is counted against backoffLimit: 74, a signal.
    """
    return {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {"action": "FailJob", "onExitCodes": _codes(*FINAL)},
            {"action": "Ignore", "onExitCodes": _codes(int(Exit.RESTART), int(Exit.FENCED))},
        ]
    }


def _codes(*values: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": list(values)}


def pod_exit(code: int) -> int:
    """What a pod leaves with when its agent ended with `code`.

    On a cluster a lost peer or a fenced agent begins the next attempt and does not end the run: 76
    and 77 become 75. The pod of a node that is sick (74) is counted, so that it does not come back
    there for ever.
    """
    return int(Exit.RESTART) if code in (Exit.CAPACITY, Exit.FENCED) else code
