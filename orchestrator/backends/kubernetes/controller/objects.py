"""The objects of one start of a TrainRun, made in an order in which each is owned by it from its
first moment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import GENERATION, REQUIRED, TOGETHER
from orchestrator.backends.kubernetes.objects.render import Manifest, elastic_sizes, render
from orchestrator.backends.kubernetes.options import KubernetesOptions, read_options
from orchestrator.backends.kubernetes.train_run import Bundle, TrainRun
from orchestrator.cluster.model import Topology
from orchestrator.plan import Plan
from orchestrator.run.request import at_size

MANAGER = "orch-controller"


def is_elastic(bundle: Bundle, options: KubernetesOptions) -> bool:
    """Whether the run changes between its sizes while its pods live."""
    return bool(elastic_sizes(at_size(bundle.request, bundle.largest), options))


def options_of(run: TrainRun, bundle: Bundle) -> KubernetesOptions:
    """OrchError (65) for a wrong one."""
    return read_options({**bundle.request.backend_options, **run.spec.options})


def manifest(
    run: TrainRun,
    bundle: Bundle,
    plan: Plan,
    options: KubernetesOptions,
    generation: int,
    topology: Topology | None,
    gated: bool,
    key: str = "",
) -> Manifest:
    """What is rendered for this start. `gated`: the controller gives pods their nodes."""
    request = structs.replace(at_size(bundle.request, plan), run_id=run.metadata.name)
    return Manifest(
        request=request,
        plan=plan,
        options=structs.replace(options, namespace=run.metadata.namespace, owner=None),
        config=bundle.config,
        namespace=run.metadata.namespace,
        key=key,
        environment=dict(run.spec.environment),
        topology=topology,
        submission=run.metadata.uid,
        generation=generation,
        train_run=run.metadata.uid,
        gated=gated,
        environment_secret=run.spec.environment_secret,
        sizes={size: one for size, one in bundle.plans.items() if size <= len(request.agents)},
    )


def make(cluster: Cluster, found: Manifest) -> None:
    """Send what is missing, the Job last. What is there of an earlier start is replaced, but for
    the Secret, whose key the run keeps, and the Job, which is of this start already.

    OrchError: 65 for what the API server refuses, 76 where it does not answer.
    """
    drawn = structs.replace(found, key=os.urandom(32).hex())
    secret, *others, job = render(drawn)
    cluster.create(secret)
    for body in others:
        cluster.apply(body, MANAGER, force=True)
    cluster.create(job)


def give(cluster: Cluster, pod: str, node: str, together: int) -> bool:
    """Take the gate off a pod, which then fits this node alone. False when the pod is gone.

    The scheduler looks at no other node for one that is named so (matchFields), however many there
    are.
    """
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    only = {"nodeSelectorTerms": [{"matchFields": [here]}]}
    affinity = {"nodeAffinity": {REQUIRED: only}}
    about = {"annotations": {TOGETHER: str(together)}}
    change = {"metadata": about, "spec": {"schedulingGates": None, "affinity": affinity}}
    return cluster.change("Pod", pod, change) is not None


def pinned_node(pod: Mapping[str, Any]) -> str:
    """The node that `give` has named, "" for none."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    for term in (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or ():
        for one in term.get("matchFields") or ():
            if one.get("key") == "metadata.name" and len(one.get("values") or ()) == 1:
                return str(one["values"][0])
    return ""


def generation_of(body: Mapping[str, Any]) -> int:
    text = (body["metadata"].get("labels") or {}).get(GENERATION, "")
    return int(text) if text.isdigit() else -1
