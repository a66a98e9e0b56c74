"""Observes runs: lists the objects of all of them at once, and reads the coordinator's log for one.
Answers are at most 2 s old."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct, structs

from orchestrator.errors import OrchError
from orchestrator.plan.codec import UNREADABLE
from orchestrator.run.bad_nodes import remember
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import read_request
from orchestrator.run.state import RunState, read_state, write_state

from .api.client import Cluster
from .names import RUN, Body, JsonObject, job_name, selector
from .phases import ObservedRun, RunStatus, index_of, status_of, stuck_pods
from .pod.status_lines import NOTHING, parse_status_line
from .record import KubernetesRecord

FRESH_S = 2.0
_MOST_LOGS = 8  # pods whose logs are searched for the last report
LOG_LINES = 400  # enough to hold the last `@orch` lines, written every ten seconds or more often

Key = tuple[str | None, str]


class RunObserver:
    """The Jobs, the pods and what explains their state, for all runs of a namespace by a few
    requests."""

    def __init__(self, cluster: Callable[[str | None, str | None], Cluster]):
        self._cluster = cluster
        self._objects: dict[Key, tuple[float, dict[str, list[JsonObject]]]] = {}
        self._runs: dict[str, tuple[float, ObservedRun]] = {}
        self._reports: dict[str, tuple[float, LastReport]] = {}

    def clear(self) -> None:
        self._objects.clear()
        self._runs.clear()
        self._reports.clear()

    def status(self, record: KubernetesRecord, run_id: str) -> RunStatus:
        return status_of(self.observe(record, run_id), time.time())

    def last_report(self, record: KubernetesRecord, run_id: str) -> LastReport:
        """Returns what the coordinator last wrote of the run's state."""
        read_at, report = self._reports.get(run_id, (float("-inf"), LastReport()))
        if time.monotonic() - read_at >= FRESH_S:
            cluster = self._cluster(record.context, record.namespace)
            report = read_last_report(cluster, self.observe(record, run_id))
            self._reports[run_id] = time.monotonic(), report
        return report

    def observe(self, record: KubernetesRecord, run_id: str) -> ObservedRun:
        """Returns the run's objects. OrchError (76, 78) if the cluster does not answer."""
        read_at, run = self._runs.get(run_id, (float("-inf"), None))
        if run is None or time.monotonic() - read_at >= FRESH_S:
            run = self._observe(record, run_id)
            self._runs[run_id] = time.monotonic(), run
        return run

    def _observe(self, record: KubernetesRecord, run_id: str) -> ObservedRun:
        objects = self._list_objects(record)
        main = _named(objects[record.kind], record.name)
        job_of_pods = job_name(record.name, record.kind)
        pods = [pod for pod in objects["Pod"] if pod["metadata"]["labels"].get(RUN) == run_id]
        newest = {}
        for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
            newest[index_of(pod)] = pod
        events: list[JsonObject] = []
        workload = None
        if main is not None and (len(newest) < _completions(main) or _any_pending(newest.values())):
            cluster = self._cluster(record.context, record.namespace)
            names = {
                record.name,
                job_of_pods,
                *(pod["metadata"]["name"] for pod in pods),
            }
            events = _warnings(cluster, names)
            if main.get("spec", {}).get("suspend"):
                workload = _workload_of(cluster, main["metadata"]["uid"])
        return ObservedRun(
            main=main,
            job=_named(objects["Job"], job_of_pods),
            pods=sorted(newest.values(), key=index_of),
            events=events,
            workload=workload,
        )

    def _list_objects(self, record: KubernetesRecord) -> dict[str, list[JsonObject]]:
        key = record.context, record.namespace
        read_at, objects = self._objects.get(key, (float("-inf"), {}))
        if time.monotonic() - read_at < FRESH_S and record.kind in objects:
            return objects
        cluster = self._cluster(*key)
        run_selector = selector()
        kinds = {"Job", "Pod", record.kind, *objects}
        # A JobSet's Job has none of our labels, so all Jobs are listed if there is a JobSet.
        objects = {kind: cluster.list(kind, run_selector) for kind in sorted(kinds - {"Job"})}
        objects["Job"] = cluster.list("Job", run_selector if record.kind == "Job" else "")
        self._objects[key] = time.monotonic(), objects
        return objects


def _warnings(cluster: Cluster, names: set[str]) -> list[JsonObject]:
    """Lists the warning events about objects of these names."""
    events = cluster.list("Event", fields="type=Warning", absent_ok=True)
    return [event for event in events if event.get("involvedObject", {}).get("name") in names]


def _workload_of(cluster: Cluster, uid: str) -> JsonObject | None:
    """Returns Kueue's Workload of the Job or JobSet with this uid."""
    workloads = cluster.list("Workload", absent_ok=True)
    workloads = workloads or cluster.list("OldWorkload", absent_ok=True)
    return next((workload for workload in workloads if _owner(workload) == uid), None)


def _named(objects: list[JsonObject], name: str) -> JsonObject | None:
    return next((body for body in objects if body["metadata"]["name"] == name), None)


def _completions(main: JsonObject) -> int:
    spec = main.get("spec", {})
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return int(spec.get("completions") or 0)


def _any_pending(pods: Any) -> bool:
    return any(pod.get("status", {}).get("phase") == "Pending" for pod in pods)


def _owner(body: JsonObject) -> str:
    owners = body["metadata"].get("ownerReferences") or []
    return owners[0].get("uid", "") if owners else ""


# ----------------------------------------------------------------------------- pod 0's status lines


class LastReport(Struct, frozen=True):
    state: RunState | None = None
    node: str = ""
    step: bytes = b""  # a line of metrics/<node>.jsonl, with its newline
    ettr: float | None = None  # effective training time ratio since the run's first start


def read_last_report(cluster: Cluster, run: ObservedRun) -> LastReport:
    """Reads the newest status lines of pod 0, or of another pod if it has none; empty if no log can
    be read."""
    started = [pod for pod in run.pods if pod.get("status", {}).get("phase") != "Pending"]
    started.sort(key=index_of)
    # any pod of an elastic run may run the coordinator
    for pod in started[:_MOST_LOGS]:
        report = parse_report(cluster.log(pod["metadata"]["name"], tail=LOG_LINES))
        if report.state is not None:
            return report
    return LastReport()


def parse_report(lines: Iterable[str]) -> LastReport:
    """Returns the last of each kind of status line."""
    state = None
    node = ""
    step = b""
    ettr = None
    for line in lines:
        if (status_line := parse_status_line(line)) is None:
            continue
        if status_line.state != NOTHING:
            try:
                state = msgspec.json.decode(status_line.state, type=RunState)
            except UNREADABLE:  # written by another version
                continue
        if status_line.step != NOTHING:
            node = status_line.node
            step = bytes(status_line.step) + b"\n"
        ettr = status_line.ettr if status_line.ettr is not None else ettr
    return LastReport(state, node, step, ettr)


def save_last_report(folder: RunFolder, report: LastReport) -> None:
    """Saves the last report in the run folder, because the coordinator's log goes with its pod.
    Nodes that the run found bad since the last report are remembered for this user's next runs
    (`orch nodes`)."""
    if report.state is not None:
        state = read_state(folder)
        remember_bad_nodes(folder, state, report.state)
        # fields that pods do not know
        state = structs.replace(
            report.state,
            created_at=state.created_at,
            summary=state.summary,
            intent=state.intent,
        )
        write_state(folder, state)
    if report.step and report.node:
        write_private(folder.metrics(report.node), report.step, durable=False)


def remember_bad_nodes(folder: RunFolder, before: RunState, now: RunState) -> None:
    """Remembers each newly excluded node once: a node that the user has forgotten since stays
    forgotten."""
    for name, reason in now.excluded.items():
        if name in before.excluded:
            continue
        # pods that share a node have a suffix (pod/rank_mapping.py)
        node = re.sub(r"\.pod-[0-9]+\Z", "", name)
        with contextlib.suppress(OrchError):
            hours = read_request(folder).policy.remember_bad_nodes_h
            remember(folder, node, reason, hours, time.time())


# ------------------------------------------------------------------------------- pods of dead nodes


def force_delete_stuck_pods(cluster: Cluster, run: ObservedRun, now: float) -> str:
    """Force-deletes pods that hang in Terminating on a node that is gone. Returns one line about
    them, or "".

    Only the node could end such a pod, and its index stays empty. Deleting it by force is not
    enough: the Job's finalizer keeps it until it has failed (podReplacementPolicy). So it is first
    marked as failed by a disruption, as Kubernetes' own collector of dead nodes' pods does. That is
    safe for runs whose pods must meet: a pod on a node that only lost its network waits for peers
    that it cannot reach until its kubelet, back on the network, ends it, and older epochs commit
    nothing. A run of one pod has no peers, so its pod is left to people; so is every pod if this
    user may not list nodes, patch pods/status or delete pods.
    """
    hanging = stuck_pods(run.pods, now)
    if not hanging or len(run.pods) < 2:
        return ""
    alive = ready_nodes(cluster.list("Node", absent_ok=True))
    deleted = []
    for pod in hanging if alive else ():
        name = pod["metadata"]["name"]
        node = pod["spec"].get("nodeName")
        if not node or node in alive:
            continue
        with contextlib.suppress(OrchError):  # not permitted: `phases.stuck` says what to do
            cluster.patch_status("Pod", name, failed_by_disruption(node, now))
            cluster.delete("Pod", name, grace_s=0)
            deleted.append(f"{name} of node {node}")
    if not deleted:
        return ""
    pods = ", ".join(deleted)
    return f"ended by force, for their nodes are gone: {pods}; others take their place"


def failed_by_disruption(node: str, now: float) -> JsonObject:
    """Builds the status of a pod whose node is gone."""
    at = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "NodeLost",
        "message": f"node {node} is gone; ended by orch",
        "lastTransitionTime": at,
    }
    return {"phase": "Failed", "conditions": [condition]}


def ready_nodes(nodes: Iterable[Body]) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in nodes
        for condition in node.get("status", {}).get("conditions") or ()
        if condition.get("type") == "Ready" and condition.get("status") == "True"
    }
