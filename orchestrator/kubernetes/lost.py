"""Pods that hang in Terminating on a node that is gone: nobody but the node ends them, and their index stays empty.

Deleting such a pod by force is what gives its index to another one. It is safe where peers have to be met: whatever
still ran on a node that only lost its network would wait for peers that have left, and older epochs commit nothing. A
run of one pod has no peers, so there it is left to people. Kubernetes' documentation: non-graceful node shutdown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.errors import OrchError

from .client import Cluster
from .phases import Seen, stuck_pods


def let_go(cluster: Cluster, seen: Seen, now: float) -> str:
    """Delete them where this user may list nodes and delete pods. What was done, in words; "" for nothing."""
    hanging = stuck_pods(seen.pods, now)
    if not hanging or len(seen.pods) < 2:
        return ""
    alive = ready_nodes(cluster.list("Node", absent_ok=True))
    done = []
    for pod in hanging if alive else ():
        if (node := pod["spec"].get("nodeName")) and node not in alive:
            with contextlib.suppress(OrchError):  # no right to: `phases.stuck` has told the remedy
                cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)
                done.append(f"{pod['metadata']['name']} of node {node}")
    return f"deleted by force, for their nodes are gone: {', '.join(done)}; others take their place" if done else ""


def ready_nodes(nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in nodes
        for condition in node.get("status", {}).get("conditions") or ()
        if condition.get("type") == "Ready" and condition.get("status") == "True"
    }
