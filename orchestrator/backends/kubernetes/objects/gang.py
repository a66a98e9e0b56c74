"""Gangs without Kueue: a gang scheduler of the cluster places all pods of a run or none. Pure.

Each scheduler reads the number of pods to place together from a place of its own, and its pods name
it differently:

- `workload`: Kubernetes' Workload API (1.35, alpha: gates GenericWorkload and GangScheduling), the
default scheduler.\n- `volcano`: a PodGroup of scheduling.volcano.sh, named by the pods.\n-
`coscheduling`: a PodGroup of scheduler-plugins, named by a label.\n- `kai`: its pod grouper makes
the group from an annotation of the Job.

Sources: https://kubernetes.io/docs/concepts/workloads/workload-api/ ; Volcano's PodGroup
documentation; https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/ ; KAI-Scheduler's
docs/batch and its change log (0.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from orchestrator.backends.kubernetes.names import Body, JsonObject
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

Gang = Literal["none", "workload", "volcano", "kai", "coscheduling"]
#: The API that shows that a cluster has the scheduler: group and version, plural of the kind. In
#: the order in which `auto` tries them.
APIS: dict[Gang, tuple[str, str]] = {
    "kai": ("scheduling.run.ai/v2alpha2", "podgroups"),
    "volcano": ("scheduling.volcano.sh/v1beta1", "podgroups"),
    "coscheduling": ("scheduling.x-k8s.io/v1alpha1", "podgroups"),
    "workload": ("scheduling.k8s.io/v1alpha1", "workloads"),
}
#: The name under which each runs by default; a site may override it (backend.options.pod:
#: spec.schedulerName).
_SCHEDULERS = {
    "volcano": "volcano",
    "kai": "kai-scheduler",
    "coscheduling": "scheduler-plugins-scheduler",
}
_GROUP = "pods"  # name of the one pod group of a Workload


def resolved(options: KubernetesOptions, serves: Callable[[str, str], bool]) -> Gang:
    """Returns the gang scheduler of these options: for `auto` the first that the cluster has, or
    none.

    OrchError (65) for one that the cluster does not have.
    """
    if options.gang == "auto":
        return next((gang for gang, api in APIS.items() if serves(*api)), "none")
    if options.gang != "none" and not serves(*APIS[options.gang]):
        group, plural = APIS[options.gang]
        message = (
            f"backend.options.gang={options.gang}: the cluster does not know {plural} of {group}"
        )
        raise OrchError(message, Exit.CONFIG)
    return options.gang


def group_object(
    options: KubernetesOptions,
    name: str,
    together: int,
    metadata: Body,
) -> dict | None:
    """Returns the object that says how many pods belong together; None if none is needed."""
    group = APIS[options.gang][0] if options.gang in APIS else ""
    if options.gang == "workload":
        policy = {"gang": {"minCount": together}}
        spec: JsonObject = {"podGroups": [{"name": _GROUP, "policy": policy}]}
        spec["controllerRef"] = {"apiGroup": "batch", "kind": "Job", "name": name}
        return {"apiVersion": group, "kind": "Workload", "metadata": metadata, "spec": spec}
    if options.gang in ("volcano", "coscheduling"):
        spec = {"minMember": together}
        if options.gang == "volcano" and options.gang_queue:
            spec["queue"] = options.gang_queue
        return {"apiVersion": group, "kind": "PodGroup", "metadata": metadata, "spec": spec}
    return None


def job_annotations(options: KubernetesOptions, together: int) -> dict[str, str]:
    """Returns the annotations of the Job."""
    return {"kai.scheduler/batch-min-member": str(together)} if options.gang == "kai" else {}


def job_labels(options: KubernetesOptions) -> dict[str, str]:
    """Returns the labels of the Job and its pods."""
    if options.gang == "kai" and options.gang_queue:
        return {"kai.scheduler/queue": options.gang_queue}
    return {}


def join_gang(template: JsonObject, options: KubernetesOptions, name: str) -> None:
    """Lets the pods name their group and their scheduler."""
    metadata = template["metadata"]
    spec = template["spec"]
    match options.gang:
        case "workload":
            spec["workloadRef"] = {"name": name, "podGroup": _GROUP}
        case "volcano":
            metadata["annotations"] = metadata["annotations"] | {
                "scheduling.k8s.io/group-name": name
            }
        case "coscheduling":
            metadata["labels"] = metadata["labels"] | {"scheduling.x-k8s.io/pod-group": name}
    if queue_label := job_labels(options):
        metadata["labels"] = metadata["labels"] | queue_label
    if options.gang in _SCHEDULERS:
        spec.setdefault("schedulerName", _SCHEDULERS[options.gang])
