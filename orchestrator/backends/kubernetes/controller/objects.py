"""Creates the objects of one start of a TrainRun, in an order in which the TrainRun owns each from
its first moment."""

from __future__ import annotations

import os

from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import GENERATION, REQUIRED, TOGETHER, Body
from orchestrator.backends.kubernetes.objects.render import Manifest, elastic_sizes, render
from orchestrator.backends.kubernetes.options import KubernetesOptions, read_options
from orchestrator.backends.kubernetes.train_run import Bundle, TrainRun
from orchestrator.cluster.model import Topology
from orchestrator.plan import Plan
from orchestrator.run.request import at_size

MANAGER = "orch-controller"


def is_elastic(bundle: Bundle, options: KubernetesOptions) -> bool:
    """Tells whether the run changes between its sizes while its pods live."""
    return bool(elastic_sizes(at_size(bundle.request, bundle.largest), options))


def options_of(run: TrainRun, bundle: Bundle) -> KubernetesOptions:
    """Returns the run's options. OrchError (65) for a wrong one."""
    return read_options({**bundle.request.backend_options, **run.spec.options})


def manifest(
    run: TrainRun,
    bundle: Bundle,
    plan: Plan,
    options: KubernetesOptions,
    *,
    generation: int,
    topology: Topology | None,
    gated: bool,
    key: str = "",
) -> Manifest:
    """Collects what this start is rendered from. `gated`: the controller gives pods their nodes."""
    request = structs.replace(at_size(bundle.request, plan), run_id=run.metadata.name)
    return Manifest(
        request=request,
        plan=plan,
        options=structs.replace(
            options,
            namespace=run.metadata.namespace,
            owner=None,
        ),
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
        sizes={size: sized for size, sized in bundle.plans.items() if size <= len(request.agents)},
    )


def make(cluster: Cluster, unsent: Manifest) -> None:
    """Sends the missing objects, the Job last. Objects of an earlier start are replaced, except for
    the Secret, whose key the run keeps, and a Job, which is of this start.

    OrchError: 65 if the API server refuses an object, 76 if it does not answer.
    """
    with_key = structs.replace(unsent, key=os.urandom(32).hex())
    secret, *companions, job = render(with_key)
    cluster.create(secret)
    for body in companions:
        cluster.apply(body, MANAGER, force=True)
    cluster.create(job)


def ungate(cluster: Cluster, pod: str, node: str, together: int) -> bool:
    """Removes the scheduling gate from a pod, which then fits this node alone. Returns False if the
    pod is gone.

    For a node that is named so (matchFields) the scheduler looks at no other node, however many
    there are.
    """
    this_node = {
        "key": "metadata.name",
        "operator": "In",
        "values": [node],
    }
    terms = {"nodeSelectorTerms": [{"matchFields": [this_node]}]}
    affinity = {"nodeAffinity": {REQUIRED: terms}}
    metadata = {"annotations": {TOGETHER: str(together)}}
    change = {"metadata": metadata, "spec": {"schedulingGates": None, "affinity": affinity}}
    return cluster.change("Pod", pod, change) is not None


def pinned_node(pod: Body) -> str:
    """Returns the node that `ungate` has pinned the pod to, or ""."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    for term in (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field.get("key") == "metadata.name" and len(field.get("values") or ()) == 1:
                return str(field["values"][0])
    return ""


def generation_of(body: Body) -> int:
    label = (body["metadata"].get("labels") or {}).get(GENERATION, "")
    return int(label) if label.isdigit() else -1
