"""The ledger made anew where it was deleted: from the pods that there are, before anything is
decided."""

from __future__ import annotations

from typing import Any

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import INDEX, RUN
from orchestrator.backends.kubernetes.objects.node_affinity import KUEUE
from orchestrator.cluster.importers.kubernetes import GPU

from .ledger import Allocation
from .objects import generation_of, pinned_node
from .store import Store


def rebuilt(cluster: Cluster, store: Store, everywhere: bool) -> dict[str, Allocation]:
    """What living pods hold by the node that each was given. Size and inputs are those of the run's
    status: a run that is wanted otherwise by now is moved as any other."""
    pods = cluster.list("AllPods" if everywhere else "Pod", RUN)
    found: dict[str, list[dict[str, Any]]] = {}
    for pod in pods:
        about = pod["metadata"]
        if pod["status"].get("phase") not in ("Succeeded", "Failed") and not _queued(pod):
            found.setdefault(f"{about['namespace']}/{about['labels'][RUN]}", []).append(pod)
    return {
        key: made
        for number, key in enumerate(sorted(found), 1)
        if (made := _made(key, found[key], number, store))
    }


def _queued(pod: dict[str, Any]) -> bool:
    return any(name.startswith(f"{KUEUE}/") for name in pod["metadata"].get("labels") or {})


def _made(key: str, pods: list[dict[str, Any]], number: int, store: Store) -> Allocation | None:
    run = store.runs.get(key)
    if (
        run is None
    ):  # of the direct path, or what is left of a run that is gone: its pods count as anybody's
        return None
    given = {int(pod["metadata"]["labels"].get(INDEX, "-1")): pinned_node(pod) for pod in pods}
    jobs = [job for job in store.jobs.all() if job.run == key and not job.finished]
    count = max([*(job.spec.completions for job in jobs), *(index + 1 for index in given)])
    nodes = [given.get(index, "") for index in range(count)]
    known = store.pods_of(key)
    needs = next((one.needs for one in known), {})
    exclusive = any(name.endswith("/gpu") or name == GPU for name in needs)
    return Allocation(
        uid=run.metadata.uid, number=number, generation=max(map(generation_of, pods)), nodes=nodes,
        needs={} if exclusive else needs, size=count, inputs=run.status.inputs,
    )  # fmt: skip
