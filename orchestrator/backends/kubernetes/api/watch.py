"""Asking the API server about all runs at once, and pod 0 about one. Answers are at most two seconds old."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator.backends.kubernetes.names import JOB_OF_SET, RUN, selector
from orchestrator.backends.kubernetes.phases import Meaning, Seen, index_of, meaning
from orchestrator.backends.kubernetes.pod.status_lines import NOTHING, parse
from orchestrator.backends.kubernetes.record import KubernetesRecord
from orchestrator.run.state import RunState
from orchestrator.run.untrusted import UNREADABLE

from .client import Cluster

FRESH_S = 2.0
_LOG_LINES = 400  # of pod 0: holds its last `@orch` lines, which come every ten seconds at least

Key = tuple[str | None, str]


class Watch:
    """Jobs, pods and what explains them, of every run in a namespace, by a few calls for all of them."""

    def __init__(self, cluster: Callable[[str | None, str | None], Cluster]):
        self._cluster = cluster
        self._found: dict[Key, tuple[float, dict[str, list[dict[str, Any]]]]] = {}
        self._seen: dict[str, tuple[float, Seen]] = {}
        self._said: dict[str, tuple[float, LastSaid]] = {}

    def clear(self) -> None:
        self._found.clear()
        self._seen.clear()
        self._said.clear()

    def meaning(self, record: KubernetesRecord, run_id: str) -> Meaning:
        return meaning(self.seen(record, run_id), time.time())

    def said(self, record: KubernetesRecord, run_id: str) -> LastSaid:
        """The newest words of the run's first pod."""
        at, found = self._said.get(run_id, (float("-inf"), LastSaid()))
        if time.monotonic() - at >= FRESH_S:
            found = last_said(self._cluster(record.context, record.namespace), self.seen(record, run_id))
            self._said[run_id] = time.monotonic(), found
        return found

    def seen(self, record: KubernetesRecord, run_id: str) -> Seen:
        """OrchError (76, 78) when the cluster does not answer."""
        at, found = self._seen.get(run_id, (float("-inf"), None))
        if found is None or time.monotonic() - at >= FRESH_S:
            found = self._see(record, run_id)
            self._seen[run_id] = time.monotonic(), found
        return found

    def _see(self, record: KubernetesRecord, run_id: str) -> Seen:
        found = self._look(record)
        main = _named(found[record.kind], record.name)
        job_name = record.name if record.kind == "Job" else f"{record.name}-{JOB_OF_SET}-0"
        pods = [pod for pod in found["Pod"] if pod["metadata"]["labels"].get(RUN) == run_id]
        newest = {}
        for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
            newest[index_of(pod)] = pod
        events, workload = (), None
        if main is not None and (len(newest) < _completions(main) or _any_pending(newest.values())):
            cluster = self._cluster(record.context, record.namespace)
            events = cluster.list("Event", fields="type=Warning", absent_ok=True)
            names = {record.name, job_name, *(pod["metadata"]["name"] for pod in pods)}
            events = [event for event in events if event.get("involvedObject", {}).get("name") in names]
            if main.get("spec", {}).get("suspend"):
                owned = cluster.list("Workload", absent_ok=True) or cluster.list("OldWorkload", absent_ok=True)
                workload = next((w for w in owned if _owner(w) == main["metadata"]["uid"]), None)
        job = _named(found["Job"], job_name)
        order = sorted(newest.values(), key=index_of)
        return Seen(main=main, job=job, pods=order, events=events, workload=workload)

    def _look(self, record: KubernetesRecord) -> dict[str, list[dict[str, Any]]]:
        key = record.context, record.namespace
        at, found = self._found.get(key, (float("-inf"), {}))
        if time.monotonic() - at < FRESH_S and record.kind in found:
            return found
        cluster, ours = self._cluster(*key), selector()
        kinds = {"Job", "Pod", record.kind, *found}
        # a JobSet's Job carries none of our labels, so Jobs are asked for by their pods' template below
        found = {kind: cluster.list(kind, ours) for kind in sorted(kinds - {"Job"})}
        found["Job"] = cluster.list("Job", ours if record.kind == "Job" else "")
        self._found[key] = time.monotonic(), found
        return found


def _named(objects: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((body for body in objects if body["metadata"]["name"] == name), None)


def _completions(main: dict[str, Any]) -> int:
    spec = main.get("spec", {})
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return int(spec.get("completions") or 0)


def _any_pending(pods: Any) -> bool:
    return any(pod.get("status", {}).get("phase") == "Pending" for pod in pods)


def _owner(body: dict[str, Any]) -> str:
    return next((owner.get("uid", "") for owner in body["metadata"].get("ownerReferences") or []), "")


# ------------------------------------------------------------------------------------------ what pod 0 says


class LastSaid(Struct, frozen=True):
    state: RunState | None = None
    node: str = ""
    step: bytes = b""  # a line of metrics/<node>.jsonl, with its end


def last_said(cluster: Cluster, seen: Seen) -> LastSaid:
    """The newest words of the run's first pod; nothing when there is none, or its log cannot be read."""
    first = next((pod for pod in seen.pods if index_of(pod) == 0), None)
    if first is None or first.get("status", {}).get("phase") == "Pending":
        return LastSaid()
    state, node, step = None, "", b""
    for line in cluster.log(first["metadata"]["name"], tail=_LOG_LINES):
        if (said := parse(line)) is None:
            continue
        if said.state != NOTHING:
            try:
                state = msgspec.json.decode(said.state, type=RunState)
            except UNREADABLE:  # of another version
                continue
        if said.step != NOTHING:
            node, step = said.node, bytes(said.step) + b"\n"
    return LastSaid(state, node, step)
