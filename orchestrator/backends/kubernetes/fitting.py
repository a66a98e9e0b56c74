"""Tells which nodes the scheduler would take for a pod of a run: by its requests, its tolerations,
and its GPU model.

A node that is chosen and then refused by the scheduler leaves the run pending forever. Pure.
Source: kube-scheduler's filters NodeResourcesFit and TaintToleration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator.cluster.gpu_models import gpu_model
from orchestrator.cluster.importers.kubernetes import PRODUCT, Node, Taint, why_not_whole
from orchestrator.plan.document import Plan

from .objects.node_affinity import HOST
from .objects.pod import pod_template
from .options import KubernetesOptions
from .pod_requests import PODS, PodShape, pod_requests, quantity

ALWAYS_REPORTED = ("cpu", "memory", PODS)  # every kubelet reports how much it has of these


#: Why a node is left out that `backend.options.exclude` names.
EXCLUDED = "excluded by orch nodes or backend.options.exclude"


class PodNeeds(Struct, frozen=True):
    """What one pod of a run needs of its node."""

    requests: dict[str, float]
    tolerations: Sequence[Mapping[str, Any]]
    gpu: str  # the model as `gpu_model` calls it; "": any
    cuda: bool = False  # needs whole GPUs


def pod_needs(plan: Plan, options: KubernetesOptions) -> PodNeeds:
    template = pod_template(
        "run",
        plan,
        options,
        0,
        labels={},
        annotations={},
        chosen=None,
        subdomain=False,
    )
    spec = template["spec"]
    requests = pod_requests(msgspec.convert(spec, PodShape))
    cuda = plan.cluster.device == "cuda"
    model = gpu_model(plan.cluster.gpu.name) if cuda else ""
    return PodNeeds(requests, spec["tolerations"], model, cuda)


def is_excluded(node: Node, options: KubernetesOptions) -> bool:
    """Tells whether the options exclude the node, by its name or by its hostname label."""
    return not {node.metadata.name, node.metadata.labels.get(HOST)}.isdisjoint(options.without)


def why_not(node: Node, needs: PodNeeds, used: Mapping[str, float]) -> str:
    """Says in a few words why a pod cannot use the node; "" if it can. `used`: sums of the requests
    of the pods on it."""
    labels = node.metadata.labels
    allocatable = node.status.allocatable
    if not labels.get(HOST, node.metadata.name):
        return f"no label {HOST}"
    for taint in node.spec.taints:
        tolerated = any(_tolerates(toleration, taint) for toleration in needs.tolerations)
        if taint.effect in ("NoSchedule", "NoExecute") and not tolerated:
            return f"taint {taint.key}"
    if needs.cuda and (shared_gpus := why_not_whole(node)):
        return shared_gpus
    product = labels.get(PRODUCT, "")
    if needs.gpu and gpu_model(product) not in ("", needs.gpu):
        return f"{product} instead of {needs.gpu}"
    for name, request in needs.requests.items():
        if name not in allocatable and name in ALWAYS_REPORTED:
            continue
        used_amount = used.get(name, 0.0)
        free = quantity(allocatable.get(name, 0)) - used_amount
        if free + 1e-9 >= request:
            continue
        if name == PODS:
            return f"too many pods ({used_amount:g} of {quantity(allocatable[name]):g})"
        return f"too little {name}" if free > 0 else f"no {name}"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Tells whether the pod tolerates the taint forever: one that must leave after some seconds
    does not fit."""
    if "tolerationSeconds" in toleration or toleration.get("effect", taint.effect) != taint.effect:
        return False
    if toleration.get("key", taint.key) != taint.key:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return toleration.get("value", "") == taint.value
