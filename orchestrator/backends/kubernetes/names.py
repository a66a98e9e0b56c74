"""Names, labels and ports of a run's objects. Pure."""

from __future__ import annotations

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

GROUP = "orch.dev"
VERSION = "v1alpha1"
KIND = "TrainRun"
GATE = "orch.dev/placement"  # scheduling gate of pods that the controller gives their node
TOGETHER = "orch.dev/together"  # how many nodes an elastic run had when this pod of it was let go
RUN = "orch.dev/run"  # label on everything of a run; its value is the run id
GENERATION = "orch.dev/generation"  # of the Job: 0, and one more with each resume
# of the pods of an index that were there before
RETURNS = "batch.kubernetes.io/job-index-ignored-failure-count"
# which the Job gives its pods, as a label since Kubernetes 1.28
INDEX = "batch.kubernetes.io/job-completion-index"
PLAN = "orch.dev/plan-hash"
SUBMISSION = "orch.dev/submission"  # of whom it was sent; the same again means the same submission
NODES = "orch.dev/nodes"  # the nodes chosen for a run that no queue places
SUMMARY = "orch.dev/summary"
MANAGED = "app.kubernetes.io/managed-by"

METRICS_PORT = 9401
RENDEZVOUS_PORT = 9402
CONTROL_PORT = 9403
#: Of a node affinity: the terms of which one must hold.
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
JOB_OF_SET = "node"  # the one replicated job of a JobSet
CONTAINER = "agent"

#: Variable of a pod -> the field of it that it holds.
OWN_FIELDS = {
    "ORCH_POD": "metadata.name",
    "ORCH_POD_NODE": "spec.nodeName",
    "ORCH_POD_ADDRESS": "status.podIP",
    "ORCH_POD_RETURNS": f"metadata.annotations['{RETURNS}']",
}

ROOT = "/orch"  # of everything that orch writes inside a pod; the same volume is its /tmp
RUNS = f"{ROOT}/runs"  # the claim is mounted here
INPUT = "/etc/orch/run"  # ConfigMap and Secret together, read only


def object_name(run_id: str, pods: int, kind: str) -> str:
    """The name of a run's Job, Service, Secret and ConfigMap. OrchError (65) when a pod's host name
    would be too long.

    A Service's name starts with a letter (RFC 1035), and a pod's host name is `<job>-<index>`: 63
    characters at most. JobSet appends `-<job>-0-<index>`, and its pod names five random characters
    more (jobset#408).
    """
    name = run_id if run_id[0].isalpha() else f"r{run_id}"
    index = len(str(max(0, pods - 1)))
    tail = 1 + index if kind == "job" else len(f"-{JOB_OF_SET}-0-") + index + 6
    if len(name) + tail > 63:
        text = (
            f"run id {run_id!r} is too long for Kubernetes by {len(name) + tail - 63}: give a"
            " shorter run.name"
        )
        raise OrchError(text, Exit.CONFIG)
    return name


def job_name(name: str, kind: str) -> str:
    """Of the Job whose pods they are: the object of that name, or the one that the JobSet of that
    name makes."""
    return name if kind.lower() == "job" else f"{name}-{JOB_OF_SET}-0"


def standard_labels(run_id: str) -> dict[str, str]:
    """On every object of a run.
    https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/"""
    return {
        "app.kubernetes.io/name": "orch",
        "app.kubernetes.io/instance": run_id,
        MANAGED: "orch",
        RUN: run_id,
    }


def pod_labels(run_id: str) -> dict[str, str]:
    """On pods: what something selects them by, and no more."""
    return {MANAGED: "orch", RUN: run_id}


def selector(run_id: str | None = None) -> str:
    """Label selector of one run's objects, or of all runs'."""
    return f"{RUN}={run_id}" if run_id else f"{MANAGED}=orch,{RUN}"
