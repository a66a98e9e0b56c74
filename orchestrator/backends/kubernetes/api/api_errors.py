"""What the API server says when it refuses, as one line with what to do and the exit code. Pure.

Status objects: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status/
"""

from __future__ import annotations

import re

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .hints import with_remedy

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""


class ApiError(OrchError):
    """An OrchError that remembers the HTTP status."""

    def __init__(self, message: str, exit: Exit, status: int):
        super().__init__(message, exit)
        self.status = status


def complaint(status: int, body: str) -> ApiError:
    """The error for an answer that is not 2xx."""
    try:
        found = msgspec.json.decode(body.encode(), type=_Status)
        text = found.message
    except msgspec.MsgspecError:
        text = body
    text = " ".join(text.split())[:600] or f"HTTP {status}"
    if status == 401:
        return ApiError("the cluster does not accept your credentials (expired?): log in again", Exit.SECURITY, status)
    if status == 403:
        return _forbidden(text)
    if status == 404 and text in ("404 page not found", "the server could not find the requested resource"):
        return ApiError("the cluster lacks this kind of object: is Kueue or JobSet installed?", Exit.CONFIG, status)
    if status == 404 and "namespaces" in text:
        return ApiError(f"{text}: make the namespace, or choose backend.options.namespace", Exit.CONFIG, status)
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
        return ApiError(with_remedy(text), Exit.CAPACITY, 403)
    if "violates PodSecurity" in text:
        return ApiError(with_remedy(text), Exit.SECURITY, 403)
    found = _FORBIDDEN.search(text)
    if not found:
        return ApiError(text, Exit.SECURITY, 403)
    where = f"in namespace {found['namespace']}" if found["namespace"] else "in the cluster (a ClusterRole)"
    rule = f'{{apiGroups: ["{found["group"]}"], resources: [{found["resource"]}], verbs: [{found["verb"]}]}}'
    who = f"{found['user']} may not {found['verb']} {found['resource']} {where}"
    return ApiError(f"{who}; the rule to add: {rule}", Exit.SECURITY, 403)


def unreachable(host: str, error: Exception) -> OrchError:
    """OrchError (76, or 78 for a certificate that does not match) for a server that gave no answer."""
    text = re.sub(r"<[^>]*>:? ?|\(Caused by |HTTPS?Connection(Pool)?\([^)]*\):? ?", "", str(error)).strip("() ")
    text = " ".join(text.split())[:200]
    if "certificate" in text.lower():
        return OrchError(f"{host}: {text}: the kubeconfig is for another cluster, or out of date", Exit.SECURITY)
    return OrchError(f"no answer from the cluster at {host}: {text}", Exit.CAPACITY)
