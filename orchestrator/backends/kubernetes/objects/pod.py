"""The pod of one agent: its container, resources and user, and what its exit code means for the
Job. Pure.

Every default meets Pod Security's `restricted` level. The pod has no field that a process can find
out or set for itself: the API server, the scheduler and every watcher read each field again
whenever one of 512 pods changes.

Sources: https://kubernetes.io/docs/concepts/security/pod-security-standards/ ; NCCL over
InfiniBand: conventions of the NVIDIA GPU and network operators (GPU and RDMA resources in requests
and limits, else NCCL silently uses sockets).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from orchestrator import start
from orchestrator.backends.kubernetes.names import (
    CONTAINER,
    INPUT,
    METRICS_PORT,
    OWN_FIELDS,
    ROOT,
    RUNS,
    JsonObject,
)
from orchestrator.backends.kubernetes.options import KubernetesOptions, Toleration, places_itself
from orchestrator.plan.document import Plan
from orchestrator.plan.exits import FATAL, Exit
from orchestrator.planner.placement.rank_assignment import save_seconds, used_node_count
from orchestrator.run.request import PackedCode

from .code_maps import code_sources
from .node_affinity import ChosenNodes, both_spellings, node_affinity, without_hosts
from .pod_patch import patched

# from the last worker's end to the kubelet's SIGKILL, for the agent's termination message
MARGIN_S = 30


def grace_seconds(plan: Plan, options: KubernetesOptions, least_s: float) -> int:
    """Returns the seconds that workers have to save after a termination signal: at least `least_s`,
    and a fifth more than a save is expected to take."""
    return ceil(max(least_s, 1.2 * save_seconds(plan, options.checkpoint_gb_per_s)))


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
    packed: PackedCode | None = None,
) -> JsonObject:
    """Builds `spec.template` of the Job. `grace_s`: the seconds that the agent gives its workers;
    the kubelet gives MARGIN_S more.

    `excluded`: hostname labels of the nodes of `options.without`; None: they were not looked up.
    `packed`: a program that travels into the pod.
    """
    spec: JsonObject = {
        "restartPolicy": "Never",  # podFailurePolicy decides, by the exit code
        "terminationGracePeriodSeconds": grace_s + MARGIN_S,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(options),
        "tolerations": tolerations(plan, options),
        "containers": [_container(plan, options)],
        "volumes": _volumes(name, plan, options, packed),
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
    # a GPU pod has its node to itself anyway
    if plan.cluster.device == "cpu" and used_node_count(plan) > 1:
        spec["topologySpreadConstraints"] = [_spread(labels)]
    metadata = {"labels": labels, "annotations": _annotations() | annotations}
    template = {"metadata": metadata, "spec": spec}
    return patched(template, options.pod, in_queue=not places_itself(options))


def _annotations() -> dict[str, str]:
    return {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "karpenter.sh/do-not-disrupt": "true",
        "sidecar.istio.io/inject": "false",
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(METRICS_PORT),  # scrapers use the right path by default
    }


def _spread(labels: dict[str, str]) -> JsonObject:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }


def tolerations(plan: Plan, options: KubernetesOptions) -> list[JsonObject]:
    """Returns the tolerations of GPU nodes' taint, and of an unresponsive node for `unreachable_s`
    instead of the default five minutes."""
    defaults: list[JsonObject] = [
        {
            "key": f"node.kubernetes.io/{key}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": options.unreachable_s,
        }
        for key in ("not-ready", "unreachable")
    ]
    if plan.cluster.device == "cuda":
        gpu_taint = {
            "key": options.gpu_resource,
            "operator": "Exists",
            "effect": "NoSchedule",
        }
        defaults.append(gpu_taint)
    return [*defaults, *map(_toleration, options.tolerations)]


def _toleration(toleration: Toleration) -> JsonObject:
    fields = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
    }
    return {name: value for name, value in fields.items() if value}


# ------------------------------------------------------------------------------------------
#     container


def _container(plan: Plan, options: KubernetesOptions) -> JsonObject:
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
            {
                "name": f"data-{index}",
                "mountPath": volume.path,
                "readOnly": volume.read_only,
            }
        )
    return {
        "name": CONTAINER,
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        # exec form: it is pid 1
        "command": [options.python, "-uP", *start.BY_NAME, "orchestrator.backends.kubernetes.pod"],
        "env": _fields(),
        # scrapers look for the port by its name
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "resources": resources(plan, options),
        "securityContext": _container_security(options),
        "volumeMounts": mounts,
    }


def _fields() -> list[JsonObject]:
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in OWN_FIELDS.items()
    ]


def resources(plan: Plan, options: KubernetesOptions) -> JsonObject:
    """Returns requests and limits of one pod. CPUs have no limit: throttling a data loader stalls
    every other node."""
    memory = quantity(sum(memory_gib(plan, options)))
    devices = {name: str(count) for name, count in options.rdma.items()}
    if plan.cluster.device == "cuda":
        devices = {options.gpu_resource: str(plan.cluster.gpus_per_node), **devices}
    cpus_per_gpu = 8 if plan.cluster.device == "cuda" else 1
    cpus = options.cpus or plan.cluster.gpus_per_node * cpus_per_gpu
    requests = {"cpu": f"{round(cpus * 1000)}m", "memory": memory, **devices}
    return {"requests": requests, "limits": {"memory": memory, **devices}}


def memory_gib(plan: Plan, options: KubernetesOptions) -> tuple[float, float]:
    """Returns (memory of the processes, /dev/shm) in GiB; /dev/shm counts against the container's
    limit too."""
    gpus = plan.cluster.gpus_per_node
    cuda = plan.cluster.device == "cuda"
    memory_per_gpu = 64 if cuda else 2
    shm_per_gpu = 4 if cuda else 0.25
    memory = options.memory_gib or gpus * memory_per_gpu
    return memory, options.shm_gib or gpus * shm_per_gpu


def quantity(gib: float) -> str:
    """Spells GiB as Kubernetes does, rounded up to a MiB: 4 -> 4Gi, 0.5 -> 512Mi."""
    mib = ceil(gib * 1024)
    return f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"


def _volumes(
    name: str,
    plan: Plan,
    options: KubernetesOptions,
    packed: PackedCode | None,
) -> list[JsonObject]:
    shm = {"medium": "Memory", "sizeLimit": quantity(memory_gib(plan, options)[1])}
    sources: list[JsonObject] = [{"configMap": {"name": name}}, {"secret": {"name": name}}]
    if packed is not None:
        sources += code_sources(packed)
    volumes: list[JsonObject] = [
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


def _pod_security(options: KubernetesOptions) -> JsonObject:
    """Returns the pod's security context. `baseline` runs as root, because an added capability
    reaches no other user's processes."""
    user = options.user if options.security == "restricted" else 0
    context: JsonObject = {
        "runAsNonRoot": options.security == "restricted",
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    # without a volume nothing outlives the pod, so nothing has another owner
    if options.claim or options.volumes:
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def _container_security(options: KubernetesOptions) -> JsonObject:
    added = {"add": ["IPC_LOCK"]} if options.security == "baseline" else {}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], **added},
    }


# --------------------------------------------------------------------------------------- exit codes

#: Exit codes of an agent whose run another start would not help. USER and INTERNAL are among them
#: because the agents have retried themselves and count `backend.max_restarts`; CAPACITY, because
#: pods exit with it only after `max_pod_returns`.
FINAL = tuple(
    sorted(
        {
            *map(int, FATAL),
            int(Exit.USER),
            int(Exit.INTERNAL),
            int(Exit.CAPACITY),
        }
    )
)


def pod_failure_policy() -> JsonObject:
    """Returns the rules in order, of which the first match wins (batch/v1 PodFailurePolicy; needs
    restartPolicy Never).

    A disruption (preemption, drain, eviction, lost node) is not counted. Neither is 75: a pod that
    got a termination signal, or waited for the others in vain; whenever one pod finds no node, all
    others exit so. Everything else counts against backoffLimit: 74, a signal.
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


def _codes(*values: int) -> JsonObject:
    return {
        "containerName": CONTAINER,
        "operator": "In",
        "values": list(values),
    }


def pod_exit(code: int) -> int:
    """Returns the pod's exit code for an agent that ended with `code`.

    On a cluster a lost peer or a fenced agent starts the next attempt and does not end the run: 76
    and 77 become 75. The pod of an unhealthy node (74) is counted, so that it does not return there
    forever.
    """
    return int(Exit.RESTART) if code in (Exit.CAPACITY, Exit.FENCED) else code
