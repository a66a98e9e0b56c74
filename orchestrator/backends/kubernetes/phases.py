"""The status of a run from its objects in the API server: its phase, why it waits, how it ended.
Pure.

Sources: batch/v1 JobStatus and pod lifecycle documentation; reasons as kubelet and scheduler spell
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from orchestrator.plan.exits import MEANING, Exit
from orchestrator.run.state import Phase

from .api.api_errors import with_hint
from .names import CONTAINER, INDEX

#: Why a container waits -> what to do. Any other reason is shown as it is.
SETUP_FAILURES: dict[str, str] = {
    "ErrImagePull": "the image cannot be pulled: backend.options.image, pull_secrets",
    "ImagePullBackOff": "the image cannot be pulled: backend.options.image, pull_secrets",
    "InvalidImageName": "backend.options.image is no image name",
    "ErrImageNeverPull": "the image is not on the node, and backend.options.pull_policy is Never",
    "CreateContainerConfigError": "something that the pod mounts is missing",
    "CreateContainerError": "the container cannot be made",
    "RunContainerError": "the container cannot be started",
}
_STUCK_S = 60.0  # beyond its grace period, a pod that is still Terminating will not end by itself


class ObservedRun(Struct, frozen=True, kw_only=True):
    """The API server's objects of one run, as they came."""

    main: Mapping[str, Any] | None  # the Job or JobSet
    job: Mapping[str, Any] | None  # the Job, which a JobSet has made
    pods: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    workload: Mapping[str, Any] | None = None  # Kueue's


class RunStatus(Struct, frozen=True, kw_only=True):
    phase: Phase
    text: str
    exit: Exit | None = None  # of the run when this is its end
    over: bool = False
    nodes: tuple[str, ...] = ()  # where its pods are
    restarts: int = 0  # pods that came back, counted or not


def status_of(run: ObservedRun, now: float) -> RunStatus:
    """The status of the run. One without a Job is over; its own state says how it ended."""
    if run.main is None:
        return RunStatus(
            phase="stopped", text="its Job is gone from the cluster", exit=Exit.RESTART, over=True
        )
    facts: dict[str, Any] = {"nodes": nodes_of(run.pods), "restarts": _restarts(run.job)}
    bodies = [body for body in (run.job, run.main) if body]
    if any(_condition(body, "Complete", "Completed") for body in bodies):
        return RunStatus(phase="done", text="done", exit=Exit.DONE, over=True, **facts)
    for kind in (
        "Failed",
        "FailureTarget",
    ):  # a Job that has failed carries both, the announcement first
        for body in bodies:
            if found := _condition(body, kind):
                return _failed(run, found, facts)
    if run.main["metadata"].get("deletionTimestamp"):
        text = stuck(run.pods, now) or "ending: its pods save and leave"
        return RunStatus(phase="stopping", text=text, **facts)
    if run.main.get("spec", {}).get("suspend"):
        return RunStatus(phase="pending", text=_suspended(run), **facts)
    return _alive(run, now, facts)


def _failed(run: ObservedRun, condition: Mapping[str, Any], facts: dict) -> RunStatus:
    codes = [code for pod in run.pods if (code := exit_code(pod)) not in (None, 0)]
    named = re.search(r"exit code (\d+)", condition.get("message", ""))
    final = [code for code in codes if code in _CODES and code != Exit.RESTART]
    code = int(named[1]) if named else final[0] if final else int(Exit.USER)
    messages = (termination_message(pod) for pod in run.pods if exit_code(pod) == code)
    why = f"{condition.get('reason', 'Failed')}: {_short(condition.get('message', ''))}"
    text = next(filter(None, messages), why)
    exit = Exit(code) if code in _CODES else Exit.USER
    if condition["type"] == "FailureTarget":  # its other pods are still leaving
        return RunStatus(phase="stopping", text=text, **facts)
    return RunStatus(phase="failed", text=text, exit=exit, over=True, **facts)


_CODES = {int(code) for code in MEANING}


def _suspended(run: ObservedRun) -> str:
    """Why Kueue has not admitted it."""
    if run.workload is None:
        return "waiting to be admitted (suspended)"
    conditions = run.workload.get("status", {}).get("conditions") or []
    for kind in ("Evicted", "QuotaReserved", "Admitted"):
        for found in conditions:
            wanted = "True" if kind == "Evicted" else "False"
            if found.get("type") == kind and found.get("status") == wanted and found.get("message"):
                return f"queued: {with_hint(_short(found['message']))}"
    return "queued"


def _alive(run: ObservedRun, now: float, facts: dict) -> RunStatus:
    pods = run.pods
    spec = (run.job or {}).get("spec", {})
    wanted = spec.get("completions") or len(pods)
    running = [
        pod
        for pod in pods
        if _phase(pod) == "Running" and not pod["metadata"].get("deletionTimestamp")
    ]
    elastic = bool(spec.get("successPolicy")) and bool(
        running
    )  # it goes on: its coordinator says how
    text = stuck(pods, now)
    if text and not elastic:
        return RunStatus(phase="restarting", text=text, **facts)
    if len(running) >= wanted:
        return RunStatus(phase="running", text="running", **facts)
    if elastic:
        return RunStatus(
            phase="running", text=text or f"{len(running)} of {wanted} pods run", **facts
        )
    if why := waiting_reason(pods, run.events):
        return RunStatus(
            phase="pending", text=f"{len(running)} of {wanted} pods run; {why}", **facts
        )
    phase: Phase = "restarting" if facts["restarts"] else "starting"
    return RunStatus(phase=phase, text=f"{len(running)} of {wanted} pods run", **facts)


def waiting_reason(pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> str:
    """The first thing that keeps pods from running: an image, a place, a quota."""
    pods = list(pods)
    for pod in pods:
        for status in pod.get("status", {}).get("containerStatuses") or []:
            waiting = status.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in SETUP_FAILURES:
                message = _short(waiting.get("message", ""), 200)
                return (
                    f"{SETUP_FAILURES[waiting['reason']]}"
                    f" ({waiting['reason']}{': ' + message if message else ''})"
                )
    for pod in pods:
        if _phase(pod) == "Pending":
            for found in pod["status"].get("conditions") or []:
                if found.get("type") == "PodScheduled" and found.get("reason") == "Unschedulable":
                    return (
                        f"no node for {_index(pod)}: {with_hint(_short(found.get('message', '')))}"
                    )
    for event in sorted(events, key=_event_time, reverse=True):
        if event.get("reason") in (
            "FailedCreate",
            "FailedMount",
            "FailedAttachVolume",
            "FailedCreatePodSandBox",
        ):
            return f"{event['reason']}: {with_hint(_short(event.get('message', '')))}"
    return ""


def stuck(pods: Iterable[Mapping[str, Any]], now: float) -> str:
    """A pod that hangs in Terminating on a node that does not answer: it is never replaced, and
    what to do."""
    for pod in stuck_pods(pods, now):
        name = pod["metadata"]["name"]
        node = pod["spec"].get("nodeName", "?")
        taint = (
            f"kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        )
        return f"pod {name} hangs on node {node}, which is gone: once the machine is off, `{taint}`"
    return ""


def stuck_pods(pods: Iterable[Mapping[str, Any]], now: float) -> list[Mapping[str, Any]]:
    """One that has ended is not stuck: its Job keeps it until another one takes its place."""
    alive = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
    return [
        pod
        for pod in alive
        if (at := seconds_of(pod["metadata"].get("deletionTimestamp"))) and now > at + _STUCK_S
    ]


# ------------------------------------------------------------------------------------------ pods


def nodes_of(pods: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Nodes of the pods that have not ended, by completion index."""
    alive = [
        pod for pod in pods if _phase(pod) in ("Pending", "Running") and pod["spec"].get("nodeName")
    ]
    return tuple(pod["spec"]["nodeName"] for pod in sorted(alive, key=index_of))


def index_of(pod: Mapping[str, Any]) -> int:
    notes = pod["metadata"].get("annotations") or {}
    labels = pod["metadata"].get("labels") or {}
    text = notes.get(INDEX) or labels.get(INDEX) or ""
    return int(text) if text.isdigit() else -1


def _index(pod: Mapping[str, Any]) -> str:
    return f"pod {index_of(pod)}"


def exit_code(pod: Mapping[str, Any]) -> int | None:
    """Of the agent's container, None while it runs."""
    ended = _terminated(pod)
    return ended.get("exitCode") if ended else None


def termination_message(pod: Mapping[str, Any]) -> str:
    """What the pod's process 1 wrote before it ended."""
    import msgspec

    message = (_terminated(pod) or {}).get("message", "")
    try:
        return str(msgspec.json.decode(message.encode(), type=dict).get("text", ""))
    except msgspec.MsgspecError:
        return _short(message)


def _terminated(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if status.get("name") == CONTAINER:
            return status.get("state", {}).get("terminated")
    return None


def _restarts(job: Mapping[str, Any] | None) -> int:
    return int((job or {}).get("status", {}).get("failed") or 0)


def _phase(pod: Mapping[str, Any]) -> str:
    return pod.get("status", {}).get("phase", "")


def _condition(body: Mapping[str, Any], *types: str) -> Mapping[str, Any] | None:
    for found in body.get("status", {}).get("conditions") or []:
        if found.get("type") in types and found.get("status") == "True":
            return found
    return None


def _event_time(event: Mapping[str, Any]) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or ""


def seconds_of(text: str | None) -> float | None:
    return datetime.fromisoformat(text).timestamp() if text else None


def _short(text: str, most: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."
