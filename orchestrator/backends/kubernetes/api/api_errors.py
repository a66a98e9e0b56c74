"""Errors of the API server as one line with what to do and the exit code. Pure.

Status objects: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/ ;
reasons as kube-apiserver, kube-scheduler 1.35 and Kueue 0.15 (flavorassigner.go,
workload_controller.go) spell them.
"""

from __future__ import annotations

import re

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.codec import decoder
from orchestrator.plan.exits import Exit

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group'
    r' "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)


#: (part of a reason, what to do). The first that is found counts: nodes that do not fit differ in
#: their reasons.
_HINTS: tuple[tuple[str, str], ...] = (
    ("exceeded quota", "ask for a larger quota, or end other runs"),
    ("violates PodSecurity", "backend.options.security must match the namespace's level"),
    (
        "persistentvolumeclaim",
        "backend.options.claim and volumes name claims of the run's namespace",
    ),
    (
        "Insufficient ",
        "wait for room, or ask for less of a node (cpus, memory_gib, gpu_resource, rdma)",
    ),
    ("untolerated taint", "backend.options.tolerations says which taints do not matter"),
    (
        "node affinity/selector",
        "backend.options.node_selector names labels that nodes with room must have",
    ),
    (
        "> maximum capacity",
        "the queue never gives that much: a smaller run, or another backend.options.queue",
    ),
    ("unavailable in ClusterQueue", "the queue has none of that: another backend.options.queue"),
    ("doesn't exist", "backend.options.queue names a LocalQueue of the run's namespace"),
    ("is inactive", "the queue is stopped or incomplete: ask who manages it"),
)


def with_hint(text: str) -> str:
    """A reason of Kubernetes or Kueue, and what to do about it where that is known."""
    return next((f"{text}; {do}" for words, do in _HINTS if words in text), text)


class NoResponse(Exception):
    """The server gave no answer, or not the whole of it. `permanent`: nor will it to another
    try."""

    def __init__(self, text: str, permanent: bool):
        super().__init__(text)
        self.permanent = permanent


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""


_STATUS = decoder(_Status)


class ApiError(OrchError):
    """An OrchError that remembers the HTTP status."""

    def __init__(self, message: str, exit: Exit, status: int):
        super().__init__(message, exit)
        self.status = status


def api_error(status: int, body: str) -> ApiError:
    """The error for an answer that is not 2xx."""
    try:
        found = _STATUS.decode(body.encode())
        text = found.message
    except msgspec.MsgspecError:
        text = body
    text = " ".join(text.split())[:600] or f"HTTP {status}"
    if status == 401:
        return ApiError(
            "the cluster does not accept your credentials (expired?): log in again",
            Exit.SECURITY,
            status,
        )
    if status == 403:
        return _forbidden(text)
    if status == 404 and text in (
        "404 page not found",
        "the server could not find the requested resource",
    ):
        return ApiError(
            "the cluster lacks this kind of object: is Kueue or JobSet installed?",
            Exit.CONFIG,
            status,
        )
    if status == 404 and "namespaces" in text:
        return ApiError(
            f"{text}: make the namespace, or choose backend.options.namespace", Exit.CONFIG, status
        )
    if status == 409:
        return ApiError(text, Exit.CONFIG, status)
    if status in (400, 422):
        return ApiError(f"the cluster refuses the object: {text}", Exit.CONFIG, status)
    if status in (429, 500, 503, 504):
        return ApiError(f"the cluster cannot answer now: {text}", Exit.CAPACITY, status)
    return ApiError(f"the cluster says {status}: {text}", Exit.CAPACITY, status)


def _forbidden(text: str) -> ApiError:
    """Quota, Pod Security or a missing right; of a right the rule that would give it."""
    if "exceeded quota" in text:
        return ApiError(with_hint(text), Exit.CAPACITY, 403)
    if "violates PodSecurity" in text:
        return ApiError(with_hint(text), Exit.SECURITY, 403)
    found = _FORBIDDEN.search(text)
    if not found:
        return ApiError(text, Exit.SECURITY, 403)
    where = (
        f"in namespace {found['namespace']}"
        if found["namespace"]
        else "in the cluster (a ClusterRole)"
    )
    rule = (
        f'{{apiGroups: ["{found["group"]}"], resources: [{found["resource"]}], verbs:'
        f" [{found['verb']}]}}"
    )
    who = f"{found['user']} may not {found['verb']} {found['resource']} {where}"
    return ApiError(f"{who}; the rule to add: {rule}", Exit.SECURITY, 403)


def unreachable(host: str, error: Exception) -> OrchError:
    """OrchError (76, or 78 for a certificate that does not match) for a server that gave no
    answer."""
    text = re.sub(
        r"<[^>]*>:? ?|\(Caused by |HTTPS?Connection(Pool)?\([^)]*\):? ?", "", str(error)
    ).strip("() ")
    text = " ".join(text.split())[:200]
    if "certificate" in text.lower():
        return OrchError(
            f"{host}: {text}: the kubeconfig is for another cluster, or out of date", Exit.SECURITY
        )
    return OrchError(f"no answer from the cluster at {host}: {text}", Exit.CAPACITY)
