"""Observes runs: asks the API server about all of them at once, and reads pod 0's log of one. At
most 2 s old."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
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
from .names import RUN, job_name, selector
from .phases import ObservedRun, RunStatus, index_of, status_of, stuck_pods
from .pod.status_lines import NOTHING, parse_status_line
from .record import KubernetesRecord

FRESH_S = 2.0
_ASKED = 8  # pods whose logs are read for it
LOG_LINES = 400  # of pod 0: holds its last `@orch` lines, which come every ten seconds at least

Key = tuple[str | None, str]


class RunObserver:
    """Jobs, pods and what explains them, of every run in a namespace, by a few calls for all of
    them."""

    def __init__(self, cluster: Callable[[str | None, str | None], Cluster]):
        self._cluster = cluster
        self._found: dict[Key, tuple[float, dict[str, list[dict[str, Any]]]]] = {}
        self._runs: dict[str, tuple[float, ObservedRun]] = {}
        self._reports: dict[str, tuple[float, LastReport]] = {}

    def clear(self) -> None:
        self._found.clear()
        self._runs.clear()
        self._reports.clear()

    def status(self, record: KubernetesRecord, run_id: str) -> RunStatus:
        return status_of(self.observe(record, run_id), time.time())

    def last_report(self, record: KubernetesRecord, run_id: str) -> LastReport:
        """What pod 0 has last written of the run's state."""
        at, found = self._reports.get(run_id, (float("-inf"), LastReport()))
        if time.monotonic() - at >= FRESH_S:
            found = read_last_report(
                self._cluster(record.context, record.namespace), self.observe(record, run_id)
            )
            self._reports[run_id] = time.monotonic(), found
        return found

    def observe(self, record: KubernetesRecord, run_id: str) -> ObservedRun:
        """OrchError (76, 78) when the cluster does not answer."""
        at, found = self._runs.get(run_id, (float("-inf"), None))
        if found is None or time.monotonic() - at >= FRESH_S:
            found = self._observe(record, run_id)
            self._runs[run_id] = time.monotonic(), found
        return found

    def _observe(self, record: KubernetesRecord, run_id: str) -> ObservedRun:
        found = self._list_objects(record)
        main = _named(found[record.kind], record.name)
        its_job = job_name(record.name, record.kind)
        pods = [pod for pod in found["Pod"] if pod["metadata"]["labels"].get(RUN) == run_id]
        newest = {}
        for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
            newest[index_of(pod)] = pod
        events: list[dict[str, Any]] = []
        workload = None
        if main is not None and (len(newest) < _completions(main) or _any_pending(newest.values())):
            cluster = self._cluster(record.context, record.namespace)
            events = cluster.list("Event", fields="type=Warning", absent_ok=True)
            names = {record.name, its_job, *(pod["metadata"]["name"] for pod in pods)}
            events = [
                event for event in events if event.get("involvedObject", {}).get("name") in names
            ]
            if main.get("spec", {}).get("suspend"):
                owned = cluster.list("Workload", absent_ok=True) or cluster.list(
                    "OldWorkload", absent_ok=True
                )
                workload = next((w for w in owned if _owner(w) == main["metadata"]["uid"]), None)
        job = _named(found["Job"], its_job)
        order = sorted(newest.values(), key=index_of)
        return ObservedRun(main=main, job=job, pods=order, events=events, workload=workload)

    def _list_objects(self, record: KubernetesRecord) -> dict[str, list[dict[str, Any]]]:
        key = record.context, record.namespace
        at, found = self._found.get(key, (float("-inf"), {}))
        if time.monotonic() - at < FRESH_S and record.kind in found:
            return found
        cluster = self._cluster(*key)
        ours = selector()
        kinds = {"Job", "Pod", record.kind, *found}
        # a JobSet's Job carries none of our labels, so Jobs are asked for by their pods' template
        # below
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
    return next(
        (owner.get("uid", "") for owner in body["metadata"].get("ownerReferences") or []), ""
    )


# ----------------------------------------------------------------------------- pod 0's status lines


class LastReport(Struct, frozen=True):
    state: RunState | None = None
    node: str = ""
    step: bytes = b""  # a line of metrics/<node>.jsonl, with its end
    ettr: float | None = None  # effective training time ratio since the run's first start


def read_last_report(cluster: Cluster, run: ObservedRun) -> LastReport:
    """From the newest status lines of pod 0, or of another where that has none; empty where no log
    can be read."""
    begun = [pod for pod in run.pods if pod.get("status", {}).get("phase") != "Pending"]
    for pod in sorted(begun, key=index_of)[
        :_ASKED
    ]:  # of an elastic run any may have the coordinator
        found = parse_report(cluster.log(pod["metadata"]["name"], tail=LOG_LINES))
        if found.state is not None:
            return found
    return LastReport()


def parse_report(lines: Iterable[str]) -> LastReport:
    """The last of each kind of status line."""
    state = None
    node = ""
    step = b""
    ettr = None
    for text in lines:
        if (line := parse_status_line(text)) is None:
            continue
        if line.state != NOTHING:
            try:
                state = msgspec.json.decode(line.state, type=RunState)
            except UNREADABLE:  # of another version
                continue
        if line.step != NOTHING:
            node = line.node
            step = bytes(line.step) + b"\n"
        ettr = line.ettr if line.ettr is not None else ettr
    return LastReport(state, node, step, ettr)


def save_last_report(folder: RunFolder, report: LastReport) -> None:
    """Keep what pod 0 last reported of the run: its log goes with its pod. Nodes that the run has
    found bad since the last time are remembered for this user's next runs (`orch nodes`)."""
    if report.state is not None:
        state = read_state(folder)
        remember_bad_nodes(folder, state, report.state)
        ours = {
            "created_at": state.created_at,
            "summary": state.summary,
            "intent": state.intent,
        }  # not known to pods
        write_state(folder, structs.replace(report.state, **ours))
    if report.step and report.node:
        write_private(folder.metrics(report.node), report.step, durable=False)


def remember_bad_nodes(folder: RunFolder, before: RunState, now: RunState) -> None:
    """Once: a node that has been forgotten since stays so."""
    for name, why in now.excluded.items():
        if name not in before.excluded:
            node = re.sub(
                r"\.pod-[0-9]+\Z", "", name
            )  # where pods share a node (pod/rank_mapping.py)
            with contextlib.suppress(OrchError):
                hours = read_request(folder).policy.remember_bad_nodes_h
                remember(folder, node, why, hours, time.time())


# ------------------------------------------------------------------------------- pods of dead nodes


def force_delete_stuck_pods(cluster: Cluster, run: ObservedRun, now: float) -> str:
    """Force-delete pods that hang in Terminating on a node that is gone. Returns one line about
    them, "" for none.

    Only the node could end them, and their index stays empty. Deleting such a pod by force is not
    enough: the Job's finalizer keeps it until it has failed (podReplacementPolicy). So it is first
    marked as failed by a disruption, as Kubernetes' own collector of dead nodes' pods does it. That
    is safe where peers have to be met: whatever still runs on a node that only lost its network
    waits for peers that it does not reach until its kubelet, which is back with the network, ends
    it, and older epochs commit nothing. A run of one pod has no peers, so there it is left to
    people, as it is where this user may not list nodes, patch pods/status or delete pods.
    """
    hanging = stuck_pods(run.pods, now)
    if not hanging or len(run.pods) < 2:
        return ""
    alive = ready_nodes(cluster.list("Node", absent_ok=True))
    done = []
    for pod in hanging if alive else ():
        if (node := pod["spec"].get("nodeName")) and node not in alive:
            with contextlib.suppress(
                OrchError
            ):  # no right to do so: `phases.stuck` says what to do
                cluster.patch_status(
                    "Pod", pod["metadata"]["name"], failed_by_disruption(node, now)
                )
                cluster.delete("Pod", pod["metadata"]["name"], grace_s=0)
                done.append(f"{pod['metadata']['name']} of node {node}")
    return (
        f"ended by force, for their nodes are gone: {', '.join(done)}; others take their place"
        if done
        else ""
    )


def failed_by_disruption(node: str, now: float) -> dict[str, Any]:
    """The status of a pod whose node is gone."""
    at = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    about = {
        "reason": "NodeLost",
        "message": f"node {node} is gone; ended by orch",
        "lastTransitionTime": at,
    }
    return {
        "phase": "Failed",
        "conditions": [{"type": "DisruptionTarget", "status": "True", **about}],
    }


def ready_nodes(nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in nodes
        for condition in node.get("status", {}).get("conditions") or ()
        if condition.get("type") == "Ready" and condition.get("status") == "True"
    }
