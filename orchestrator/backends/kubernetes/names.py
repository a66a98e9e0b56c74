"""Names, labels and ports of a run's objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

#: An object of the API server as JSON values, or a part of one: to read, and to build.
Body = Mapping[str, Any]
JsonObject = dict[str, Any]

GROUP = "orch.dev"
VERSION = "v1alpha1"
KIND = "TrainRun"
GATE = "orch.dev/placement"  # scheduling gate of pods whose node the controller chooses
TOGETHER = "orch.dev/together"  # nodes that an elastic run had when this pod's gate was removed
RUN = "orch.dev/run"  # label on everything of a run; its value is the run id
GENERATION = "orch.dev/generation"  # the Job's generation: 0, one higher with each resume
# number of earlier pods of the same index; the Job annotates its pods with it
RETURNS = "batch.kubernetes.io/job-index-ignored-failure-count"
# index that the Job gives each pod; a label too since Kubernetes 1.28
INDEX = "batch.kubernetes.io/job-completion-index"
PLAN = "orch.dev/plan-hash"
CODE_DIGEST = "orch.dev/code"  # label of ConfigMaps that hold a program; its value is their digest
SUBMISSION = "orch.dev/submission"  # id of the submission that sent the object
NODES = "orch.dev/nodes"  # the nodes chosen for a run without a queue
SUMMARY = "orch.dev/summary"
MANAGED = "app.kubernetes.io/managed-by"

METRICS_PORT = 9401
RENDEZVOUS_PORT = 9402
CONTROL_PORT = 9403
#: The field of a node affinity whose terms are alternatives: one must hold.
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
JOB_OF_SET = "node"  # the one replicated job of a JobSet
CONTAINER = "agent"

#: Environment variable of a pod -> the field of the pod that it holds.
OWN_FIELDS = {
    "ORCH_POD": "metadata.name",
    "ORCH_POD_NODE": "spec.nodeName",
    "ORCH_POD_ADDRESS": "status.podIP",
    "ORCH_POD_RETURNS": f"metadata.annotations['{RETURNS}']",
}

ROOT = "/orch"  # holds everything that orch writes inside a pod; the same volume is its /tmp
RUNS = f"{ROOT}/runs"  # the claim is mounted here
CODE = f"{ROOT}/code"  # holds a folder per run, with the program that travelled
INPUT = "/etc/orch/run"  # ConfigMap and Secret together, read only


def object_name(run_id: str, pods: int, kind: str) -> str:
    """Returns the name of a run's Job, Service, Secret and ConfigMap. OrchError (65) if a pod's
    host name would be too long.

    A Service's name starts with a letter (RFC 1035), and a pod's host name is `<job>-<index>`, 63
    characters at most. JobSet appends `-<job>-0-<index>`, and its pod names five random characters
    more (jobset#408).
    """
    name = run_id if run_id[0].isalpha() else f"r{run_id}"
    index_digits = len(str(max(0, pods - 1)))
    tail = 1 + index_digits if kind == "job" else len(f"-{JOB_OF_SET}-0-") + index_digits + 6
    excess = len(name) + tail - 63
    if excess > 0:
        message = (
            f"run id {run_id!r} is too long for Kubernetes by {excess}: give a shorter run.name"
        )
        raise OrchError(message, Exit.CONFIG)
    return name


def job_name(name: str, kind: str) -> str:
    """Returns the name of the Job that owns the pods: the object of that name, or the Job that the
    JobSet of that name creates."""
    return name if kind.lower() == "job" else f"{name}-{JOB_OF_SET}-0"


def standard_labels(run_id: str) -> dict[str, str]:
    """Returns the labels of every object of a run.
    https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/"""
    return {
        "app.kubernetes.io/name": "orch",
        "app.kubernetes.io/instance": run_id,
        MANAGED: "orch",
        RUN: run_id,
    }


def pod_labels(run_id: str) -> dict[str, str]:
    """Returns the labels of pods: only those that something selects them by."""
    return {MANAGED: "orch", RUN: run_id}


def selector(run_id: str | None = None) -> str:
    """Returns a label selector of one run's objects, or of all runs'."""
    return f"{RUN}={run_id}" if run_id else f"{MANAGED}=orch,{RUN}"
