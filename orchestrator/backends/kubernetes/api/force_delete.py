"""Pods that hang in Terminating on a node that is gone: nobody but the node ends them, and their index stays empty.

Deleting such a pod by force is not enough: the Job's finalizer keeps it until it has failed (podReplacementPolicy). So
it is marked as failed by a disruption first, as Kubernetes' own collector of dead nodes' pods does it. That is safe
where peers have to be met: whatever still ran on a node that only lost its network would wait for peers that have left,
and older epochs commit nothing. A run of one pod has no peers, so there it is left to people.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from orchestrator.backends.kubernetes.phases import Seen, stuck_pods
from orchestrator.errors import OrchError

from .client import Cluster


def let_go(cluster: Cluster, seen: Seen, now: float) -> str:
    """End them where this user may list nodes, patch pods/status and delete pods. What was done, in words; "" for
    nothing."""
    hanging = stuck_pods(seen.pods, now)
    if not hanging or len(seen.pods) < 2:
        return ""
    alive = ready_nodes(cluster.list("Node", absent_ok=True))
    done = []
    for pod in hanging if alive else ():
        if (node := pod["spec"].get("nodeName")) and node not in alive:
            with contextlib.suppress(OrchError):  # no right to: `phases.stuck` has told the remedy
                cluster.patch_status("Pod", pod["metadata"]["name"], _failed(node, now))
                cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)
                done.append(f"{pod['metadata']['name']} of node {node}")
    return f"ended by force, for their nodes are gone: {', '.join(done)}; others take their place" if done else ""


def _failed(node: str, now: float) -> dict[str, Any]:
    at = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    told = {"reason": "NodeLost", "message": f"node {node} is gone; ended by orch", "lastTransitionTime": at}
    return {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True", **told}]}


def ready_nodes(nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in nodes
        for condition in node.get("status", {}).get("conditions") or ()
        if condition.get("type") == "Ready" and condition.get("status") == "True"
    }
