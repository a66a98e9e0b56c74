"""Requests to one cluster's API server: apply, read, delete, follow logs. Every failure becomes one
line within seconds.

`access` finds the server and the credentials. Objects stay plain dictionaries, because what is sent
must be what was rendered. Long lists are read into types that keep only the needed fields.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct, field

from orchestrator.backends.kubernetes.names import Body, JsonObject
from orchestrator.errors import OrchError
from orchestrator.plan.codec import decoder
from orchestrator.plan.exits import Exit

from .access import Access, Unusable, access
from .api_errors import NoResponse, api_error, unreachable

if TYPE_CHECKING:
    from .exec import PodCommand
    from .transport import Response

_READ_S = 12.0
_RETRY_FOR_S = 8.0
_JSON = "application/json"
_MERGE_PATCH = "application/merge-patch+json"
_PAGE = 2000  # objects
_RETRY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # between tries of an idempotent request

#: kind -> path with {ns}; a cluster-wide kind has none.
PATHS: dict[str, str] = {
    "ConfigMap": "/api/v1/namespaces/{ns}/configmaps",
    "Secret": "/api/v1/namespaces/{ns}/secrets",
    "Service": "/api/v1/namespaces/{ns}/services",
    "Pod": "/api/v1/namespaces/{ns}/pods",
    "Event": "/api/v1/namespaces/{ns}/events",
    "Job": "/apis/batch/v1/namespaces/{ns}/jobs",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{ns}/leases",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{ns}/networkpolicies",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{ns}/jobsets",
    "Workload": "/apis/kueue.x-k8s.io/v1beta2/namespaces/{ns}/workloads",
    "OldWorkload": "/apis/kueue.x-k8s.io/v1beta1/namespaces/{ns}/workloads",  # before Kueue 0.15
    "LocalQueue": "/apis/kueue.x-k8s.io/v1beta2/namespaces/{ns}/localqueues",
    "OldLocalQueue": "/apis/kueue.x-k8s.io/v1beta1/namespaces/{ns}/localqueues",
    "WorkloadPriorityClass": "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses",
    "OldWorkloadPriorityClass": "/apis/kueue.x-k8s.io/v1beta1/workloadpriorityclasses",
    "Node": "/api/v1/nodes",
    "AllPods": "/api/v1/pods",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "OldResourceSlice": "/apis/resource.k8s.io/v1beta1/resourceslices",  # before Kubernetes 1.34
    "AllResourceClaims": "/apis/resource.k8s.io/v1/resourceclaims",
    "OldAllResourceClaims": "/apis/resource.k8s.io/v1beta1/resourceclaims",
    "AllJobs": "/apis/batch/v1/jobs",
    "PodGroup scheduling.volcano.sh": (
        "/apis/scheduling.volcano.sh/v1beta1/namespaces/{ns}/podgroups"
    ),
    "PodGroup scheduling.x-k8s.io": "/apis/scheduling.x-k8s.io/v1alpha1/namespaces/{ns}/podgroups",
    "Workload scheduling.k8s.io": "/apis/scheduling.k8s.io/v1alpha1/namespaces/{ns}/workloads",
    "TrainRun": "/apis/orch.dev/v1alpha1/namespaces/{ns}/trainruns",
    "AllTrainRuns": "/apis/orch.dev/v1alpha1/trainruns",
}

#: Names of kinds that several API groups have.
_OF_GROUP = ("PodGroup", "Workload")


def kind_of(body: Body) -> str:
    """Returns the object's key in PATHS."""
    kind = str(body["kind"])
    group = str(body["apiVersion"]).partition("/")[0]
    return f"{kind} {group}" if kind in _OF_GROUP and group != "kueue.x-k8s.io" else kind


T = TypeVar("T")
Objects = list[JsonObject]


def in_background(call: Callable[[], T]) -> Future[T]:
    """Runs the call in a daemon thread; the future has its result or its exception.

    A command that fails meanwhile ends at once; with a thread of an executor it would wait for a
    server that does not answer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised by `future.result()`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def gather(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Runs the calls at once and returns their results. If one raises, this raises too, once the
    others have ended."""
    futures = [in_background(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


class _ListMeta(Struct):
    continue_token: str = field(default="", name="continue")


class _Page(Struct, Generic[T]):
    items: list[T] | None = None
    metadata: _ListMeta = field(default_factory=_ListMeta)


class Cluster:
    """The cluster of a kubeconfig context, or the one that this process runs in."""

    def __init__(self, context: str | None = None, namespace: str | None = None):
        self._context = context
        self._namespace = namespace
        self._known_access: Access | None = None
        self._access_lock = threading.Lock()  # credential plugins take a second

    @property
    def _access(self) -> Access:
        """Finds the server and the credentials once. OrchError (65, 76) if no cluster is
        configured."""
        with self._access_lock:
            if self._known_access is None:
                self._known_access = access(self._context, os.environ)
            return self._known_access

    @property
    def namespace(self) -> str:
        return self._namespace or self._access.namespace

    @property
    def address(self) -> str:
        return self._access.host

    def within(self, namespace: str) -> Cluster:
        """Returns the same cluster, over the same connections, in another namespace."""
        cluster = Cluster(self._context, namespace)
        cluster._known_access = self._access
        return cluster

    # ---------------------------------------------------------------------------------- objects

    def apply(
        self,
        body: Body,
        manager: str,
        force: bool = False,
        dry_run: bool = False,
    ) -> dict:
        """Applies the object on the server side. OrchError (65) if another manager owns a field
        with another value."""
        query = {
            "fieldManager": manager,
            "force": str(force).lower(),
            "fieldValidation": "Strict",
        }
        if dry_run:
            query["dryRun"] = "All"
        raw = msgspec.json.encode(body)
        path = self._path(kind_of(body), body["metadata"]["name"])
        return self._json("PATCH", path, query, raw, "application/apply-patch+yaml")

    def create(self, body: Body) -> dict | None:
        """Creates the object; None if an object of that name exists."""
        with _answer(409) as answer:
            path = self._path(kind_of(body))
            answer.value = self._json("POST", path, {}, msgspec.json.encode(body), _JSON)
        return answer.value

    def merge(self, kind: str, name: str, change: Body, manager: str) -> dict:
        """Sets these fields and leaves the others (RFC 7386)."""
        raw = msgspec.json.encode(change)
        query = {"fieldManager": manager}
        return self._json("PATCH", self._path(kind, name), query, raw, _MERGE_PATCH)

    def replace(self, body: Body) -> dict | None:
        """Replaces the whole object at the version that its metadata names; None if it has another
        version now, or is gone."""
        with _answer(404, 409) as answer:
            path = self._path(body["kind"], body["metadata"]["name"])
            answer.value = self._json("PUT", path, {}, msgspec.json.encode(body), _JSON)
        return answer.value

    def change(self, kind: str, name: str, change: Body, subresource: str = "") -> dict | None:
        """Sends a merge patch (RFC 7386), to a subresource such as "/status" if one is named.
        Returns None if the object is gone, or has another uid or version now than the patch
        names."""
        raw = msgspec.json.encode(change)
        path = self._path(kind, name) + subresource
        with _answer(404, 409) as answer:
            answer.value = self._json("PATCH", path, {}, raw, _MERGE_PATCH)
        return answer.value

    def has(self, group_version: str, plural: str = "") -> bool:
        """Tells whether the API server serves the group and, with `plural`, that kind in it.
        OrchError (76) if it does not answer."""
        with _answer(403, 404) as answer:
            answer.value = self._json("GET", f"/apis/{group_version}")
        kinds = {resource.get("name") for resource in (answer.value or {}).get("resources") or ()}
        return answer.value is not None and (not plural or plural in kinds)

    def patch_status(self, kind: str, name: str, change: Body) -> dict:
        """Merges a change into the status; conditions are merged by their type."""
        raw = msgspec.json.encode({"status": change})
        path = self._path(kind, name) + "/status"
        return self._json("PATCH", path, {}, raw, "application/strategic-merge-patch+json")

    def get(self, kind: str, name: str) -> dict | None:
        with _answer(404) as answer:
            answer.value = self._json("GET", self._path(kind, name))
        return answer.value

    def list(
        self, kind: str, labels: str = "", fields: str = "", absent_ok: bool = False
    ) -> Objects:
        """Lists the objects. `absent_ok`: returns [] if the cluster has no such kind, or it may not
        be read."""
        with _answer(*((404, 403) if absent_ok else ())) as answer:
            answer.value = self.read(kind, JsonObject, labels, fields)
        return answer.value or []

    def read(
        self,
        kind: str,
        object_type: type[T],
        labels: str = "",
        fields: str = "",
        cached: bool = False,
    ) -> Sequence[T]:
        """Lists objects as `list` does, each decoded into `object_type`. `cached`: from the API
        server's cache, which may be a moment old but reads no storage."""
        query = {"resourceVersion": "0"} if cached else {"limit": str(_PAGE)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        objects: list[T] = []
        page_of: Any = _Page
        pages = decoder(page_of[object_type])
        while True:
            page = pages.decode(self._raw("GET", self._path(kind), query))
            objects += page.items or ()
            if not page.metadata.continue_token:
                return objects
            query["continue"] = page.metadata.continue_token

    def events(self, kind: str, query: Mapping[str, str], read_s: float) -> Response:
        """Starts a watch: one line per event until the server ends it. The caller closes it."""
        watch = {"watch": "1", **query}
        response, _ = self._send("GET", self._path(kind), watch, read_s=read_s, stream=True)
        return response

    def page(self, kind: str, query: Mapping[str, str]) -> bytes:
        """Returns one page of a list as the server sent it."""
        return self._raw("GET", self._path(kind), query)

    def delete(
        self,
        kind: str,
        name: str,
        propagation: str = "Background",
        grace_s: int | None = None,
        only: tuple[str, str] | None = None,
    ) -> bool:
        """Deletes the object; False if there was none. `only`: deletes it only at this uid and
        version."""
        options: JsonObject = {"propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if only is not None:
            options["preconditions"] = {"uid": only[0], "resourceVersion": only[1]}
        expected = (404, 409) if only else (404,)
        with _answer(*expected) as answer:
            body = msgspec.json.encode(options)
            answer.value = self._json("DELETE", self._path(kind, name), {}, body, _JSON)
        return answer.value is not None

    def log(
        self, pod: str, follow: bool = False, tail: int | None = None, previous: bool = False
    ) -> Iterator[str]:
        """Yields the lines of a pod's container; none if it has not started or is gone."""
        query = {}
        if follow:
            query["follow"] = "true"
        if tail is not None:
            query["tailLines"] = str(tail)
        if previous:
            query["previous"] = "true"
        with _answer(400, 404, 500) as answer:  # not started yet; gone; its node does not answer
            read_s = None if follow else _READ_S
            path = self._path("Pod", pod) + "/log"
            answer.value, _ = self._send("GET", path, query, read_s=read_s, stream=True)
        if answer.value is None:
            return
        rest = b""
        with contextlib.closing(answer.value) as response:
            for chunk in response.chunks():
                *complete_lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="backslashreplace") for line in complete_lines)
        if rest:
            yield rest.decode(errors="backslashreplace")

    def evict(self, pod: str, grace_s: int) -> None:
        """Evicts the pod as a drain does: SIGTERM, and SIGKILL after the grace period. OrchError
        (76) if a disruption budget forbids it."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
            "deleteOptions": {"gracePeriodSeconds": grace_s},
        }
        path = self._path("Pod", pod) + "/eviction"
        self._json("POST", path, {}, msgspec.json.encode(body), _JSON)

    def command(self, pod: str, container: str, argv: Sequence[str]) -> PodCommand:
        """Starts a command in a running pod. OrchError (76, 78)."""
        from .exec import PodCommand

        access = self._access
        try:
            settings = access.settings()
        except Unusable as error:
            raise OrchError(f"exec into the pod: {error}", Exit.CAPACITY) from None
        url = access.host + self._path("Pod", pod)
        return PodCommand(settings, url, access.headers(), container, argv)

    def version(self) -> str:
        answer = self._json("GET", "/version")
        return str(answer.get("gitVersion", "?"))

    # ---------------------------------------------------------------------------------- transport

    def _path(self, kind: str, name: str = "") -> str:
        return PATHS[kind].format(ns=self.namespace) + (f"/{name}" if name else "")

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        kind: str = "",
    ) -> dict:
        return msgspec.json.decode(self._raw(method, path, query or {}, body, kind))

    def _raw(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        kind: str = "",
    ) -> bytes:
        _, content = self._send(method, path, query, body, kind)
        return content

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        kind: str = "",
        read_s: float | None = _READ_S,
        stream: bool = False,
    ) -> tuple[Response, bytes]:
        """Returns a 2xx response with its content, or without it if it is streamed.

        Every method but POST is idempotent here, so after a lost connection the request is repeated
        for some seconds.
        """
        access = self._access
        headers = {"Accept": _JSON, "User-Agent": "orch"}
        if kind:
            headers["Content-Type"] = kind
        target = f"{path}?{urlencode(query)}" if query else path
        pauses = iter(_RETRY_PAUSES_S if method != "POST" else ())
        end = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                all_headers = headers | dict(access.headers())
                answer = access.transport.request(method, target, body, all_headers, read_s)
                if answer.status < 300 and stream:
                    return answer, b""
                content = answer.read()
            except NoResponse as error:
                pause = next(pauses, None) if not error.permanent else None
                if pause is None or time.monotonic() > end:
                    raise unreachable(access.host, error) from None
            else:
                if answer.status < 300:
                    return answer, content
                pause = next(pauses, None) if answer.status in (429, 503, 504) else None
                if pause is None:
                    raise api_error(answer.status, content.decode(errors="replace"))
            time.sleep(pause)


class _Answer:
    value: Any = None


@contextlib.contextmanager
def _answer(*expected: int) -> Iterator[_Answer]:
    """Holds the answer of a request, or None if its HTTP status is one of `expected`."""
    answer = _Answer()
    try:
        yield answer
    except OrchError as error:
        if getattr(error, "status", None) not in expected:
            raise
