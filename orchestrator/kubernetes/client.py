"""One cluster's API server: apply, read, delete, follow logs; every failure becomes one line within seconds.

The kubernetes package finds the server and the credentials (kubeconfig with its plugins, or the pod's own account) and
speaks TLS; objects stay plain dictionaries, because what is sent must be what was rendered.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .complaints import complaint, unreachable

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONNECT_S, _READ_S, _PATIENCE_S = 5.0, 12.0, 8.0
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
}


class Cluster:
    """The cluster of a kubeconfig context, or the one that this process runs in."""

    def __init__(self, context: str | None = None, namespace: str | None = None):
        self._context, self._wanted = context, namespace

    @cached_property
    def _server(self) -> tuple[Any, Any, str]:
        """(HTTP pool, configuration, namespace). OrchError (76) when no cluster is configured."""
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        settings = client.Configuration()
        try:
            contexts, active = _contexts(config)
            if contexts or self._context:
                chosen = next((c for c in contexts if c["name"] == self._context), None) if self._context else active
                if chosen is None:
                    from orchestrator.suggest import did_you_mean

                    names = [c["name"] for c in contexts]
                    text = f"no context {self._context!r} in the kubeconfig; {did_you_mean(self._context or '', names)}"
                    raise OrchError(text, Exit.CONFIG)
                config.load_kube_config(context=chosen["name"], client_configuration=settings)
                space = chosen["context"].get("namespace") or "default"
            else:
                config.load_incluster_config(client_configuration=settings)
                space = _ACCOUNT.read_text().strip()
        except (ConfigException, OSError) as error:
            text = "no Kubernetes cluster is configured: no usable kubeconfig (KUBECONFIG), and this is no pod"
            raise OrchError(f"{text} ({str(error).splitlines()[0]})", Exit.CAPACITY) from None
        if not settings.verify_ssl:  # the kubeconfig says so; a warning a request would bury everything else
            import urllib3

            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        api = client.ApiClient(settings)
        return api.rest_client.pool_manager, settings, self._wanted or space

    @property
    def namespace(self) -> str:
        return self._server[2]

    @property
    def address(self) -> str:
        return self._server[1].host

    # ---------------------------------------------------------------------------------- objects

    def apply(self, body: Mapping[str, Any], manager: str, force: bool = False, dry_run: bool = False) -> dict:
        """Server-side apply. OrchError (65) when another manager owns a field with another value."""
        query = {"fieldManager": manager, "force": str(force).lower(), "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        raw = json.dumps(body).encode()
        path = self._path(body["kind"], body["metadata"]["name"])
        return self._json("PATCH", path, query, raw, "application/apply-patch+yaml")

    def create(self, body: Mapping[str, Any]) -> dict | None:
        """None when an object of that name exists."""
        with _answer(409) as answer:
            answer.value = self._json(
                "POST", self._path(body["kind"]), {}, json.dumps(body).encode(), "application/json"
            )
        return answer.value

    def patch_status(self, kind: str, name: str, change: Mapping[str, Any]) -> dict:
        """Into the status, conditions by their type."""
        raw = json.dumps({"status": change}).encode()
        path = self._path(kind, name) + "/status"
        return self._json("PATCH", path, {}, raw, "application/strategic-merge-patch+json")

    def get(self, kind: str, name: str) -> dict | None:
        with _answer(404) as answer:
            answer.value = self._json("GET", self._path(kind, name))
        return answer.value

    def list(self, kind: str, labels: str = "", fields: str = "", absent_ok: bool = False) -> list[dict]:
        """`absent_ok`: no such kind in this cluster, or no right to read it, is an empty list."""
        query = {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}
        found: list[dict] = []
        while True:
            with _answer(*((404, 403) if absent_ok else ())) as answer:
                answer.value = self._json("GET", self._path(kind), {**query, "limit": "2000"})
            if answer.value is None:
                return found
            found += answer.value.get("items") or []
            if not (more := answer.value.get("metadata", {}).get("continue")):
                return found
            query["continue"] = more

    def delete(self, kind: str, name: str, propagation: str = "Background", grace_s: int | None = None) -> bool:
        """False when there was nothing to delete."""
        options: dict[str, Any] = {"propagationPolicy": propagation}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        with _answer(404) as answer:
            body = json.dumps(options).encode()
            answer.value = self._json("DELETE", self._path(kind, name), {}, body, "application/json")
        return answer.value is not None

    def log(self, pod: str, follow: bool = False, tail: int | None = None, previous: bool = False) -> Iterator[str]:
        """Lines of a pod's container. Nothing when it has not started or is gone."""
        query = {"follow": "true"} if follow else {}
        query |= {"tailLines": str(tail)} if tail is not None else {}
        query |= {"previous": "true"} if previous else {}
        with _answer(400, 404, 500) as answer:  # not started yet; gone; its node does not answer
            read_s = None if follow else _READ_S
            answer.value = self._send("GET", self._path("Pod", pod) + "/log", query, read_s=read_s)
        if answer.value is None:
            return
        rest = b""
        with contextlib.closing(answer.value) as response, contextlib.suppress(*_lost()):
            for chunk in response.stream(1 << 16, decode_content=False):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="backslashreplace") for line in whole)
        if rest:
            yield rest.decode(errors="backslashreplace")

    def version(self) -> str:
        found = self._json("GET", "/version")
        return str(found.get("gitVersion", "?"))

    # ---------------------------------------------------------------------------------- transport

    def _path(self, kind: str, name: str = "") -> str:
        return PATHS[kind].format(ns=self.namespace) + (f"/{name}" if name else "")

    def _json(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: bytes | None = None, kind: str = ""
    ) -> dict:
        response = self._send(method, path, query or {}, body, kind)
        try:
            return json.loads(response.data)
        finally:
            response.release_conn()

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        kind: str = "",
        read_s: float | None = _READ_S,
    ) -> Any:
        """A response of 2xx. Everything but POST says the same when it is repeated, so a lost connection is tried
        again for some seconds."""
        import urllib3

        pool, settings, _ = self._server
        headers = {"Accept": "application/json", "User-Agent": "orch"} | ({"Content-Type": kind} if kind else {})
        for auth in settings.auth_settings().values():
            if auth.get("in") == "header" and auth.get("value"):
                headers[auth["key"]] = auth["value"]
        url = settings.host + path + (f"?{urlencode(query)}" if query else "")
        timeout = urllib3.Timeout(connect=_CONNECT_S, read=read_s)
        pauses = iter(_AGAIN_S if method != "POST" else ())
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                response = pool.request(
                    method, url, body=body, headers=headers, timeout=timeout, retries=False, preload_content=False
                )
            except urllib3.exceptions.HTTPError as error:
                pause = next(pauses, None) if not isinstance(error, urllib3.exceptions.SSLError) else None
                if pause is None or time.monotonic() > end:
                    raise unreachable(settings.host, error) from None
            else:
                if response.status < 300:
                    return response
                text = response.data.decode(errors="replace")
                response.release_conn()
                pause = next(pauses, None) if response.status in (429, 503, 504) else None
                if pause is None:
                    raise complaint(response.status, text)
            time.sleep(pause)


class _Answer:
    value: Any = None


@contextlib.contextmanager
def _answer(*expected: int) -> Iterator[_Answer]:
    """Holds the answer of a request; None when the server said one of `expected`."""
    answer = _Answer()
    try:
        yield answer
    except OrchError as error:
        if getattr(error, "status", None) not in expected:
            raise


def _lost() -> tuple[type[Exception], ...]:
    import urllib3

    return (urllib3.exceptions.HTTPError, OSError)


def _contexts(config: Any) -> tuple[list[dict], dict | None]:
    """The kubeconfig's contexts and its current one; none when there is no kubeconfig."""
    from kubernetes.config.config_exception import ConfigException

    try:
        return config.list_kube_config_contexts()
    except (ConfigException, TypeError):
        return [], None
