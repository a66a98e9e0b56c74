"""Rebuilds a ledger that was deleted: from the living pods, before anything is decided."""

from __future__ import annotations

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import INDEX, RUN, JsonObject
from orchestrator.backends.kubernetes.objects.node_affinity import KUEUE
from orchestrator.cluster.importers.kubernetes import GPU

from .ledger import Allocation
from .objects import generation_of, pinned_node
from .store import Store


def rebuilt(cluster: Cluster, store: Store, everywhere: bool) -> dict[str, Allocation]:
    """Returns what living pods hold, by the node that each was given. Size and inputs are those of
    the run's status: a run whose spec has changed since is moved like any other."""
    pods = cluster.list("AllPods" if everywhere else "Pod", RUN)
    pods_by_run: dict[str, list[JsonObject]] = {}
    for pod in pods:
        metadata = pod["metadata"]
        key = f"{metadata['namespace']}/{metadata['labels'][RUN]}"
        if pod["status"].get("phase") not in ("Succeeded", "Failed") and not _queued(pod):
            pods_by_run.setdefault(key, []).append(pod)
    allocations = {}
    for number, key in enumerate(sorted(pods_by_run), 1):
        allocation = _allocation(key, pods_by_run[key], number, store)
        if allocation is not None:
            allocations[key] = allocation
    return allocations


def _queued(pod: JsonObject) -> bool:
    return any(name.startswith(f"{KUEUE}/") for name in pod["metadata"].get("labels") or {})


def _allocation(
    key: str,
    pods: list[JsonObject],
    number: int,
    store: Store,
) -> Allocation | None:
    run = store.runs.get(key)
    # a run without a controller, or the rest of a deleted one: its pods count like any others
    if run is None:
        return None
    node_by_index = {
        int(pod["metadata"]["labels"].get(INDEX, "-1")): pinned_node(pod) for pod in pods
    }
    jobs = [job for job in store.jobs.all() if job.run == key and not job.finished]
    counts = [job.spec.completions for job in jobs] + [index + 1 for index in node_by_index]
    count = max(counts)
    needs = next((pod.needs for pod in store.pods_of(key)), {})
    exclusive = any(name.endswith("/gpu") or name == GPU for name in needs)
    return Allocation(
        uid=run.metadata.uid,
        number=number,
        generation=max(map(generation_of, pods)),
        nodes=[node_by_index.get(index, "") for index in range(count)],
        needs={} if exclusive else needs,
        size=count,
        inputs=run.status.inputs,
    )
