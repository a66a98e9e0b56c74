"""Which nodes the scheduler would take for a pod of a run: what it asks for, what it tolerates,
which GPUs it is for.

A node that is chosen and then refused by the scheduler leaves the run pending for ever. Pure.
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

SAID = ("cpu", "memory", PODS)  # every kubelet says how much it has of these


#: Why a node is left out that `backend.options.exclude` names.
EXCLUDED = "excluded by orch nodes or backend.options.exclude"


class PodNeeds(Struct, frozen=True):
    """Of one pod of a run."""

    requests: dict[str, float]
    tolerations: Sequence[Mapping[str, Any]]
    gpu: str  # the model as `gpu_model` calls it; "": any
    cuda: bool = False  # of whole GPUs


def pod_needs(plan: Plan, options: KubernetesOptions) -> PodNeeds:
    spec = pod_template("run", plan, options, 0, {}, {}, None, subdomain=False)["spec"]
    needs = pod_requests(msgspec.convert(spec, PodShape))
    cuda = plan.cluster.device == "cuda"
    return PodNeeds(
        needs, spec["tolerations"], gpu_model(plan.cluster.gpu.name) if cuda else "", cuda
    )


def is_excluded(node: Node, options: KubernetesOptions) -> bool:
    """Whether it is named, by its own name or by its hostname label."""
    return not {node.metadata.name, node.metadata.labels.get(HOST)}.isdisjoint(options.without)


def why_not(node: Node, needs: PodNeeds, used: Mapping[str, float]) -> str:
    """Why a pod cannot go to the node, in a few words; "" when it can. `used`: requests of the pods
    that are there."""
    labels = node.metadata.labels
    has = node.status.allocatable
    if not labels.get(HOST, node.metadata.name):
        return f"no label {HOST}"
    for taint in node.spec.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not any(
            _tolerates(t, taint) for t in needs.tolerations
        ):
            return f"taint {taint.key}"
    if needs.cuda and (parts := why_not_whole(node)):
        return parts
    product = labels.get(PRODUCT, "")
    if needs.gpu and gpu_model(product) not in ("", needs.gpu):
        return f"{product} instead of {needs.gpu}"
    for name, wanted in needs.requests.items():
        if name not in has and name in SAID:
            continue
        if (free := quantity(has.get(name, 0)) - used.get(name, 0.0)) + 1e-9 < wanted:
            if name == PODS:
                return f"too many pods ({used.get(name, 0.0):g} of {quantity(has[name]):g})"
            return f"too little {name}" if free > 0 else f"no {name}"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """For ever: a pod that must leave again after some seconds does not fit."""
    if "tolerationSeconds" in toleration or toleration.get("effect", taint.effect) != taint.effect:
        return False
    if toleration.get("key", taint.key) != taint.key:
        return False
    return (
        toleration.get("operator", "Equal") == "Exists"
        or toleration.get("value", "") == taint.value
    )
