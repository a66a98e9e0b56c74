"""One cluster's API server: apply, read, delete, follow logs; every failure becomes one line within
seconds.

`access` finds the server and the credentials; objects stay plain dictionaries, because what is sent
must be what was rendered. Long lists are read into types that keep what matters.
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
_PAGE = 2000  # objects
_AGAIN_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # between tries of a request that may be repeated without harm

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

#: Kinds of which several groups have one.
_OF_GROUP = ("PodGroup", "Workload")


def kind_of(body: Mapping[str, Any]) -> str:
    """The object's key in PATHS."""
    kind = str(body["kind"])
    group = str(body["apiVersion"]).partition("/")[0]
    return f"{kind} {group}" if kind in _OF_GROUP and group != "kueue.x-k8s.io" else kind


T = TypeVar("T")
Objects = list[dict[str, Any]]


def in_background(call: Callable[[], T]) -> Future[T]:
    """What the call will return or raise. A daemon thread: a command that fails meanwhile ends
    without waiting for a server that does not answer, which it would for a thread of an
    executor."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def gather(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of calls made at once. When one raises, so does this, after the others have
    ended, too."""
    futures = [in_background(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


class _More(Struct):
    more: str = field(default="", name="continue")


class _Page(Struct, Generic[T]):
    items: list[T] | None = None
    metadata: _More = field(default_factory=_More)


class Cluster:
    """The cluster of a kubeconfig context, or the one that this process runs in."""

    def __init__(self, context: str | None = None, namespace: str | None = None):
        self._context = context
        self._wanted = namespace
        self._found: Access | None = None
        self._finding = threading.Lock()  # credential plugins take a second

    @property
    def _access(self) -> Access:
        """OrchError (65, 76) when no cluster is configured."""
        with self._finding:
            if self._found is None:
                self._found = access(self._context, os.environ)
            return self._found

    @property
    def namespace(self) -> str:
        return self._wanted or self._access.namespace

    @property
    def address(self) -> str:
        return self._access.host

    def within(self, namespace: str) -> Cluster:
        """The same cluster, over the same connections, in another namespace."""
        found = Cluster(self._context, namespace)
        found._found = self._access
        return found

    # ---------------------------------------------------------------------------------- objects

    def apply(
        self, body: Mapping[str, Any], manager: str, force: bool = False, dry_run: bool = False
    ) -> dict:
        """Server-side apply. OrchError (65) when another manager owns a field with another
        value."""
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        raw = msgspec.json.encode(body)
        path = self._path(kind_of(body), body["metadata"]["name"])
        return self._json("PATCH", path, query, raw, "application/apply-patch+yaml")

    def create(self, body: Mapping[str, Any]) -> dict | None:
        """None when an object of that name exists."""
        with _answer(409) as answer:
            answer.value = self._json(
                "POST", self._path(kind_of(body)), {}, msgspec.json.encode(body), "application/json"
            )
        return answer.value

    def merge(self, kind: str, name: str, change: Mapping[str, Any], manager: str) -> dict:
        """Set these fields and leave the others (RFC 7386)."""
        raw = msgspec.json.encode(change)
        how = "application/merge-patch+json"
        return self._json("PATCH", self._path(kind, name), {"fieldManager": manager}, raw, how)

    def replace(self, body: Mapping[str, Any]) -> dict | None:
        """The whole object, at the version that its metadata names. None when it has another one by
        now, or is gone."""
        with _answer(404, 409) as answer:
            path = self._path(body["kind"], body["metadata"]["name"])
            answer.value = self._json(
                "PUT", path, {}, msgspec.json.encode(body), "application/json"
            )
        return answer.value

    def change(
        self, kind: str, name: str, change: Mapping[str, Any], part: str = ""
    ) -> dict | None:
        """A merge patch (RFC 7386), of `part` where it is "/status". None when the object is gone,
        or is another or of another version by now than the patch names."""
        raw = msgspec.json.encode(change)
        how = "application/merge-patch+json"
        with _answer(404, 409) as answer:
            answer.value = self._json("PATCH", self._path(kind, name) + part, {}, raw, how)
        return answer.value

    def has(self, group_version: str, plural: str = "") -> bool:
        """Whether the API server serves it, and in it that kind. OrchError (76) when it does not
        answer."""
        with _answer(403, 404) as answer:
            answer.value = self._json("GET", f"/apis/{group_version}")
        kinds = {one.get("name") for one in (answer.value or {}).get("resources") or ()}
        return answer.value is not None and (not plural or plural in kinds)

    def patch_status(self, kind: str, name: str, change: Mapping[str, Any]) -> dict:
        """Into the status, conditions by their type."""
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
        """`absent_ok`: no such kind in this cluster, or no right to read it, is an empty list."""
        with _answer(*((404, 403) if absent_ok else ())) as answer:
            answer.value = self.read(kind, dict[str, Any], labels, fields)
        return answer.value or []

    def read(
        self, kind: str, of: type[T], labels: str = "", fields: str = "", cached: bool = False
    ) -> Sequence[T]:
        """As `list`, of each object what `of` has fields for. `cached`: as the API server remembers
        them, which may be a moment old but asks nobody."""
        query = {
            name: text
            for name, text in (("labelSelector", labels), ("fieldSelector", fields))
            if text
        }
        query |= {"resourceVersion": "0"} if cached else {"limit": str(_PAGE)}
        found: list[T] = []
        page_of: Any = _Page
        pages = decoder(page_of[of])
        while True:
            page = pages.decode(self._raw("GET", self._path(kind), query))
            found += page.items or ()
            if not page.metadata.more:
                return found
            query["continue"] = page.metadata.more

    def events(self, kind: str, query: Mapping[str, str], read_s: float) -> Response:
        """A watch that has begun: a line an event, until the server ends it. To be closed."""
        return self._send(
            "GET", self._path(kind), {"watch": "1", **query}, read_s=read_s, stream=True
        )[0]

    def page(self, kind: str, query: Mapping[str, str]) -> bytes:
        """A page of a list, as it came."""
        return self._raw("GET", self._path(kind), query)

    def delete(
        self,
        kind: str,
        name: str,
        propagation: str = "Background",
        grace_s: int | None = None,
        only: tuple[str, str] | None = None,
    ) -> bool:
        """False when there was nothing to delete. `only`: uid and version; another one of that name
        stays."""
        options: dict[str, Any] = {"propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if only is not None:
            options["preconditions"] = {"uid": only[0], "resourceVersion": only[1]}
        with _answer(404, *((409,) if only else ())) as answer:
            body = msgspec.json.encode(options)
            answer.value = self._json(
                "DELETE", self._path(kind, name), {}, body, "application/json"
            )
        return answer.value is not None

    def log(
        self, pod: str, follow: bool = False, tail: int | None = None, previous: bool = False
    ) -> Iterator[str]:
        """Lines of a pod's container. Nothing when it has not started or is gone."""
        query = {"follow": "true"} if follow else {}
        query |= {"tailLines": str(tail)} if tail is not None else {}
        query |= {"previous": "true"} if previous else {}
        with _answer(400, 404, 500) as answer:  # not started yet; gone; its node does not answer
            read_s = None if follow else _READ_S
            answer.value, _ = self._send(
                "GET", self._path("Pod", pod) + "/log", query, read_s=read_s, stream=True
            )
        if answer.value is None:
            return
        rest = b""
        with contextlib.closing(answer.value) as response:
            for chunk in response.chunks():
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="backslashreplace") for line in whole)
        if rest:
            yield rest.decode(errors="backslashreplace")

    def evict(self, pod: str, grace_s: int) -> None:
        """As a drain does it: SIGTERM, and SIGKILL after the grace. OrchError (76) where a
        disruption budget forbids it."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        body |= {"deleteOptions": {"gracePeriodSeconds": grace_s}}
        self._json(
            "POST",
            self._path("Pod", pod) + "/eviction",
            {},
            msgspec.json.encode(body),
            "application/json",
        )

    def command(self, pod: str, container: str, argv: Sequence[str]) -> PodCommand:
        """Start a command in a running pod. OrchError (76, 78)."""
        from .exec import PodCommand

        to = self._access
        try:
            settings = to.settings()
        except Unusable as error:
            raise OrchError(f"exec into the pod: {error}", Exit.CAPACITY) from None
        return PodCommand(settings, to.host + self._path("Pod", pod), to.headers(), container, argv)

    def version(self) -> str:
        found = self._json("GET", "/version")
        return str(found.get("gitVersion", "?"))

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
        return self._send(method, path, query, body, kind)[1]

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
        """A response of 2xx with its content, unless it is to be streamed.

        Every method but POST is idempotent here, so a lost connection is tried again for some
        seconds.
        """
        to = self._access
        headers = {"Accept": "application/json", "User-Agent": "orch"} | (
            {"Content-Type": kind} if kind else {}
        )
        target = path + (f"?{urlencode(query)}" if query else "")
        pauses = iter(_AGAIN_S if method != "POST" else ())
        end = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                answer = to.transport.request(
                    method, target, body, headers | dict(to.headers()), read_s
                )
                if answer.status < 300 and stream:
                    return answer, b""
                content = answer.read()
            except NoResponse as error:
                pause = next(pauses, None) if not error.permanent else None
                if pause is None or time.monotonic() > end:
                    raise unreachable(to.host, error) from None
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
    """Holds the answer of a request; None when its HTTP status is one of `expected`."""
    answer = _Answer()
    try:
        yield answer
    except OrchError as error:
        if getattr(error, "status", None) not in expected:
            raise
