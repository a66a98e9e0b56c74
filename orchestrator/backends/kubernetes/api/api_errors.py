"""Turns an error of the API server into one line with a remedy and the exit code. Pure.

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


#: (part of a reason, remedy). The first match counts, because nodes that do not fit differ in their
#: reasons.
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


def with_hint(reason: str) -> str:
    """Adds the remedy, if one is known, to a reason of Kubernetes or Kueue."""
    for phrase, remedy in _HINTS:
        if phrase in reason:
            return f"{reason}; {remedy}"
    return reason


class NoResponse(Exception):
    """The server gave no answer, or only a part of one. `permanent`: another try would fail as
    well."""

    def __init__(self, message: str, permanent: bool):
        super().__init__(message)
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
    """Builds the error for an answer that is not 2xx."""
    try:
        reason = _STATUS.decode(body.encode()).message
    except msgspec.MsgspecError:
        reason = body
    reason = " ".join(reason.split())[:600] or f"HTTP {status}"
    if status == 401:
        message = "the cluster does not accept your credentials (expired?): log in again"
        return ApiError(message, Exit.SECURITY, status)
    if status == 403:
        return _forbidden(reason)
    if status == 404 and reason in _NO_SUCH_KIND:
        message = "the cluster lacks this kind of object: is Kueue or JobSet installed?"
        return ApiError(message, Exit.CONFIG, status)
    if status == 404 and "namespaces" in reason:
        message = f"{reason}: create the namespace, or choose backend.options.namespace"
        return ApiError(message, Exit.CONFIG, status)
    if status == 409:
        return ApiError(reason, Exit.CONFIG, status)
    if status in (400, 422):
        return ApiError(f"the cluster refuses the object: {reason}", Exit.CONFIG, status)
    if status in (429, 500, 503, 504):
        return ApiError(f"the cluster cannot answer now: {reason}", Exit.CAPACITY, status)
    return ApiError(f"the cluster says {status}: {reason}", Exit.CAPACITY, status)


_NO_SUCH_KIND = ("404 page not found", "the server could not find the requested resource")


def _forbidden(reason: str) -> ApiError:
    """Builds the error for a quota, a Pod Security violation or a missing permission; for a
    permission with the rule that would grant it."""
    if "exceeded quota" in reason:
        return ApiError(with_hint(reason), Exit.CAPACITY, 403)
    if "violates PodSecurity" in reason:
        return ApiError(with_hint(reason), Exit.SECURITY, 403)
    denied = _FORBIDDEN.search(reason)
    if not denied:
        return ApiError(reason, Exit.SECURITY, 403)
    verb = denied["verb"]
    resource = denied["resource"]
    scope = "in the cluster (a ClusterRole)"
    if denied["namespace"]:
        scope = f"in namespace {denied['namespace']}"
    rule = f'{{apiGroups: ["{denied["group"]}"], resources: [{resource}], verbs: [{verb}]}}'
    message = f"{denied['user']} may not {verb} {resource} {scope}; the rule to add: {rule}"
    return ApiError(message, Exit.SECURITY, 403)


def unreachable(host: str, error: Exception) -> OrchError:
    """Builds the error for a server that gave no answer: 76, or 78 for a certificate that does not
    match."""
    wrapping = r"<[^>]*>:? ?|\(Caused by |HTTPS?Connection(Pool)?\([^)]*\):? ?"
    reason = re.sub(wrapping, "", str(error)).strip("() ")
    reason = " ".join(reason.split())[:200]
    if "certificate" in reason.lower():
        return OrchError(
            f"{host}: {reason}: the kubeconfig is for another cluster, or out of date",
            Exit.SECURITY,
        )
    return OrchError(f"no answer from the cluster at {host}: {reason}", Exit.CAPACITY)
