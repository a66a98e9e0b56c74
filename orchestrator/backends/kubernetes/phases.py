"""Derives the status of a run from its objects in the API server: its phase, why it waits, how it
ended. Pure.

Sources: batch/v1 JobStatus and pod lifecycle documentation; reasons are spelled as kubelet and
scheduler spell them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec import Struct

from orchestrator.plan.exits import MEANING, Exit
from orchestrator.run.state import Phase

from .api.api_errors import with_hint
from .names import CONTAINER, INDEX, Body, JsonObject

#: Reason why a container waits -> what to do. Any other reason is shown as it is.
SETUP_FAILURES: dict[str, str] = {
    "ErrImagePull": "the image cannot be pulled: backend.options.image, pull_secrets",
    "ImagePullBackOff": "the image cannot be pulled: backend.options.image, pull_secrets",
    "InvalidImageName": "backend.options.image is not the name of an image",
    "ErrImageNeverPull": "the image is not on the node, and backend.options.pull_policy is Never",
    "CreateContainerConfigError": "an object that the pod mounts is missing",
    "CreateContainerError": "the container cannot be created",
    "RunContainerError": "the container cannot be started",
}
_STUCK_S = 60.0  # a pod that is Terminating this long after its grace period will not end by itself


class ObservedRun(Struct, frozen=True, kw_only=True):
    """The API server's objects of one run, unchanged."""

    main: Body | None  # the Job or JobSet
    job: Body | None  # the Job itself, also if a JobSet created it
    pods: Sequence[Body] = ()
    events: Sequence[Body] = ()
    workload: Body | None = None  # Kueue's


class RunStatus(Struct, frozen=True, kw_only=True):
    phase: Phase
    reason: str
    exit: Exit | None = None  # exit code of the run if it has ended
    over: bool = False
    nodes: tuple[str, ...] = ()  # nodes of its pods
    restarts: int = 0  # pods that failed and were replaced, counted or not


def status_of(run: ObservedRun, now: float) -> RunStatus:
    """Returns the status of the run. A run without a Job is over; its own state says how it
    ended."""
    if run.main is None:
        return RunStatus(
            phase="stopped",
            reason="its Job is gone from the cluster",
            exit=Exit.RESTART,
            over=True,
        )
    facts: JsonObject = {"nodes": nodes_of(run.pods), "restarts": _restarts(run.job)}
    bodies = [body for body in (run.job, run.main) if body]
    if any(_condition(body, "Complete", "Completed") for body in bodies):
        return RunStatus(
            phase="done",
            reason="done",
            exit=Exit.DONE,
            over=True,
            **facts,
        )
    # a Job that has failed has both conditions, FailureTarget first
    for kind in ("Failed", "FailureTarget"):
        for body in bodies:
            if condition := _condition(body, kind):
                return _failed(run, condition, facts)
    if run.main["metadata"].get("deletionTimestamp"):
        reason = stuck(run.pods, now) or "ending: its pods save and leave"
        return RunStatus(phase="stopping", reason=reason, **facts)
    if run.main.get("spec", {}).get("suspend"):
        return RunStatus(phase="pending", reason=_suspended(run), **facts)
    return _alive(run, now, facts)


def _failed(run: ObservedRun, condition: Body, facts: dict) -> RunStatus:
    codes = [code for pod in run.pods if (code := exit_code(pod)) not in (None, 0)]
    named = re.search(r"exit code (\d+)", condition.get("message", ""))
    final = [code for code in codes if code in _CODES and code != Exit.RESTART]
    if named:
        code = int(named[1])
    else:
        code = final[0] if final else int(Exit.USER)
    messages = (termination_message(pod) for pod in run.pods if exit_code(pod) == code)
    job_message = f"{condition.get('reason', 'Failed')}: {_short(condition.get('message', ''))}"
    reason = next(filter(None, messages), job_message)
    exit = Exit(code) if code in _CODES else Exit.USER
    if condition["type"] == "FailureTarget":  # its other pods are still ending
        return RunStatus(phase="stopping", reason=reason, **facts)
    return RunStatus(
        phase="failed",
        reason=reason,
        exit=exit,
        over=True,
        **facts,
    )


_CODES = {int(code) for code in MEANING}


def _suspended(run: ObservedRun) -> str:
    """Says why Kueue has not admitted the run."""
    if run.workload is None:
        return "waiting to be admitted (suspended)"
    conditions = run.workload.get("status", {}).get("conditions") or []
    for kind in ("Evicted", "QuotaReserved", "Admitted"):
        blocking_status = "True" if kind == "Evicted" else "False"
        for condition in conditions:
            blocks = condition.get("type") == kind and condition.get("status") == blocking_status
            if blocks and condition.get("message"):
                return f"queued: {with_hint(_short(condition['message']))}"
    return "queued"


def _alive(run: ObservedRun, now: float, facts: dict) -> RunStatus:
    pods = run.pods
    spec = (run.job or {}).get("spec", {})
    wanted_pods = spec.get("completions") or len(pods)
    running = [pod for pod in pods if _phase(pod) == "Running"]
    running = [pod for pod in running if not pod["metadata"].get("deletionTimestamp")]
    pod_counts = f"{len(running)} of {wanted_pods} pods run"
    # an elastic run with any pod runs: its coordinator says how
    elastic = bool(spec.get("successPolicy")) and bool(running)
    stuck_pod = stuck(pods, now)
    if stuck_pod and not elastic:
        return RunStatus(phase="restarting", reason=stuck_pod, **facts)
    if len(running) >= wanted_pods:
        return RunStatus(phase="running", reason="running", **facts)
    if elastic:
        return RunStatus(phase="running", reason=stuck_pod or pod_counts, **facts)
    if reason := waiting_reason(pods, run.events):
        return RunStatus(phase="pending", reason=f"{pod_counts}; {reason}", **facts)
    phase: Phase = "restarting" if facts["restarts"] else "starting"
    return RunStatus(phase=phase, reason=pod_counts, **facts)


def waiting_reason(pods: Iterable[Body], events: Iterable[Body]) -> str:
    """Returns the first reason that keeps pods from running: an image, a node, a quota."""
    pods = list(pods)
    reasons = [_setup_failure(pod) for pod in pods] + [_unschedulable(pod) for pod in pods]
    if reason := next(filter(None, reasons), ""):
        return reason
    for event in sorted(events, key=_event_time, reverse=True):
        if event.get("reason") in _FAILED_EVENTS:
            return f"{event['reason']}: {with_hint(_short(event.get('message', '')))}"
    return ""


_FAILED_EVENTS = ("FailedCreate", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")


def _setup_failure(pod: Body) -> str:
    for status in pod.get("status", {}).get("containerStatuses") or []:
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason in SETUP_FAILURES:
            message = _short(waiting.get("message", ""), 200)
            detail = f"{reason}: {message}" if message else reason
            return f"{SETUP_FAILURES[reason]} ({detail})"
    return ""


def _unschedulable(pod: Body) -> str:
    if _phase(pod) != "Pending":
        return ""
    for condition in pod["status"].get("conditions") or []:
        if condition.get("type") != "PodScheduled" or condition.get("reason") != "Unschedulable":
            continue
        return f"no node for {_index(pod)}: {with_hint(_short(condition.get('message', '')))}"
    return ""


def stuck(pods: Iterable[Body], now: float) -> str:
    """Names a pod that hangs in Terminating on a node that does not answer, and what to do: it is
    never replaced by itself."""
    for pod in stuck_pods(pods, now):
        name = pod["metadata"]["name"]
        node = pod["spec"].get("nodeName", "?")
        taint = (
            f"kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        )
        return f"pod {name} hangs on node {node}, which is gone: once the machine is off, `{taint}`"
    return ""


def stuck_pods(pods: Iterable[Body], now: float) -> list[Body]:
    """Returns the pods that should have ended by now. One that has ended is not stuck: its Job
    keeps it until a replacement exists."""
    alive = [pod for pod in pods if _phase(pod) not in ("Succeeded", "Failed")]
    due_at = [seconds_of(pod["metadata"].get("deletionTimestamp")) for pod in alive]
    pairs = zip(alive, due_at, strict=True)
    return [pod for pod, due in pairs if due and now > due + _STUCK_S]


# ------------------------------------------------------------------------------------------ pods


def nodes_of(pods: Iterable[Body]) -> tuple[str, ...]:
    """Returns the nodes of the pods that have not ended, by completion index."""
    alive = [pod for pod in pods if _phase(pod) in ("Pending", "Running")]
    nodes = [pod["spec"].get("nodeName") for pod in sorted(alive, key=index_of)]
    return tuple(filter(None, nodes))


def index_of(pod: Body) -> int:
    annotations = pod["metadata"].get("annotations") or {}
    labels = pod["metadata"].get("labels") or {}
    index = annotations.get(INDEX) or labels.get(INDEX) or ""
    return int(index) if index.isdigit() else -1


def _index(pod: Body) -> str:
    return f"pod {index_of(pod)}"


def exit_code(pod: Body) -> int | None:
    """Returns the exit code of the agent's container, or None while it runs."""
    termination = _terminated(pod)
    return termination.get("exitCode") if termination else None


def termination_message(pod: Body) -> str:
    """Returns what the pod's process 1 wrote before it ended."""
    import msgspec

    message = (_terminated(pod) or {}).get("message", "")
    try:
        return str(msgspec.json.decode(message.encode(), type=dict).get("text", ""))
    except msgspec.MsgspecError:
        return _short(message)


def _terminated(pod: Body) -> Body | None:
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if status.get("name") == CONTAINER:
            return status.get("state", {}).get("terminated")
    return None


def _restarts(job: Body | None) -> int:
    return int((job or {}).get("status", {}).get("failed") or 0)


def _phase(pod: Body) -> str:
    return pod.get("status", {}).get("phase", "")


def _condition(body: Body, *types: str) -> Body | None:
    for condition in body.get("status", {}).get("conditions") or []:
        if condition.get("type") in types and condition.get("status") == "True":
            return condition
    return None


def _event_time(event: Body) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or ""


def seconds_of(timestamp: str | None) -> float | None:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def _short(message: str, longest: int = 400) -> str:
    message = " ".join(message.split())
    return message if len(message) <= longest else message[: longest - 3] + "..."
