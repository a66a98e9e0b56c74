"""Gangs without Kueue: all of a run's pods are placed or none, by a scheduler that the cluster has.
Pure.

Each wants the number of pods that must be placed together in a place of its own, and its own name
in the pods:

- `workload`: Kubernetes' Workload API (1.35, alpha: gates GenericWorkload and GangScheduling), the
  default scheduler.
- `volcano`: a PodGroup of scheduling.volcano.sh, named by the pods.
- `coscheduling`: a PodGroup of scheduler-plugins, named by a label.
- `kai`: its pod grouper makes the group from an annotation of the Job.

Sources: https://kubernetes.io/docs/concepts/workloads/workload-api/ ; Volcano's PodGroup
documentation; https://scheduler-plugins.sigs.k8s.io/docs/plugins/coscheduling/ ; KAI-Scheduler's
docs/batch and its change log (0.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

Gang = Literal["none", "workload", "volcano", "kai", "coscheduling"]
#: Which API tells that a cluster has it: group and version, plural of the kind. In the order in
#: which `auto` asks.
APIS: dict[Gang, tuple[str, str]] = {
    "kai": ("scheduling.run.ai/v2alpha2", "podgroups"),
    "volcano": ("scheduling.volcano.sh/v1beta1", "podgroups"),
    "coscheduling": ("scheduling.x-k8s.io/v1alpha1", "podgroups"),
    "workload": ("scheduling.k8s.io/v1alpha1", "workloads"),
}
#: Under which name each runs unless a site has called it otherwise (backend.options.pod:
#: spec.schedulerName).
_SCHEDULERS = {
    "volcano": "volcano",
    "kai": "kai-scheduler",
    "coscheduling": "scheduler-plugins-scheduler",
}
_GROUP = "pods"  # of a Workload


def resolved(options: KubernetesOptions, serves: Callable[[str, str], bool]) -> Gang:
    """The gang scheduler of these options: `auto` is the first that the cluster has, or none.

    OrchError (65) for one that it does not have.
    """
    if options.gang == "auto":
        return next((gang for gang, api in APIS.items() if serves(*api)), "none")
    if options.gang != "none" and not serves(*APIS[options.gang]):
        group, plural = APIS[options.gang]
        text = f"backend.options.gang={options.gang}: the cluster does not know {plural} of {group}"
        raise OrchError(text, Exit.CONFIG)
    return options.gang


def group_object(
    options: KubernetesOptions, name: str, together: int, metadata: Mapping[str, Any]
) -> dict | None:
    """The object that says how many pods belong together; None where none is needed."""
    group = APIS[options.gang][0] if options.gang in APIS else ""
    if options.gang == "workload":
        policy = {"gang": {"minCount": together}}
        spec: dict[str, Any] = {"podGroups": [{"name": _GROUP, "policy": policy}]}
        spec["controllerRef"] = {"apiGroup": "batch", "kind": "Job", "name": name}
        return {"apiVersion": group, "kind": "Workload", "metadata": metadata, "spec": spec}
    if options.gang in ("volcano", "coscheduling"):
        spec = {"minMember": together}
        if options.gang == "volcano" and options.gang_queue:
            spec["queue"] = options.gang_queue
        return {"apiVersion": group, "kind": "PodGroup", "metadata": metadata, "spec": spec}
    return None


def job_notes(options: KubernetesOptions, together: int) -> dict[str, str]:
    """Annotations of the Job."""
    return {"kai.scheduler/batch-min-member": str(together)} if options.gang == "kai" else {}


def job_labels(options: KubernetesOptions) -> dict[str, str]:
    """On the Job and its pods."""
    return (
        {"kai.scheduler/queue": options.gang_queue}
        if options.gang == "kai" and options.gang_queue
        else {}
    )


def join_gang(template: dict[str, Any], options: KubernetesOptions, name: str) -> None:
    """The pods say which group they are of, and who is to place them."""
    about = template["metadata"]
    spec = template["spec"]
    match options.gang:
        case "workload":
            spec["workloadRef"] = {"name": name, "podGroup": _GROUP}
        case "volcano":
            about["annotations"] = about["annotations"] | {"scheduling.k8s.io/group-name": name}
        case "coscheduling":
            about["labels"] = about["labels"] | {"scheduling.x-k8s.io/pod-group": name}
    if more := job_labels(options):
        about["labels"] = about["labels"] | more
    if options.gang in _SCHEDULERS:
        spec.setdefault("schedulerName", _SCHEDULERS[options.gang])
