"""What can be done about it: words of Kubernetes' and Kueue's own reasons, and the option or the step. Pure.

Reasons as kube-apiserver, kube-scheduler 1.35 and Kueue 0.15 (flavorassigner.go, workload_controller.go) spell them.
"""

from __future__ import annotations

#: The first whose words are found counts: of nodes that differ in why they do not fit, the most telling.
_REMEDIES: tuple[tuple[str, str], ...] = (
    ("exceeded quota", "ask for a larger quota, or end other runs"),
    ("violates PodSecurity", "backend.options.security must match the namespace's level"),
    ("persistentvolumeclaim", "backend.options.claim and volumes name claims of the run's namespace"),
    ("Insufficient ", "wait for room, or ask for less of a node (cpus, memory_gib, gpu_resource, rdma)"),
    ("untolerated taint", "backend.options.tolerations says which taints do not matter"),
    ("node affinity/selector", "backend.options.node_selector names labels that nodes with room must have"),
    ("> maximum capacity", "the queue never gives that much: a smaller run, or another backend.options.queue"),
    ("unavailable in ClusterQueue", "the queue has none of that: another backend.options.queue"),
    ("doesn't exist", "backend.options.queue names a LocalQueue of the run's namespace"),
    ("is inactive", "the queue is stopped or incomplete: ask who manages it"),
)


def with_remedy(text: str) -> str:
    """A reason, and what to do where that is known."""
    return next((f"{text}; {do}" for words, do in _REMEDIES if words in text), text)
