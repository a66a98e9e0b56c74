"""Putting a run's objects into the cluster, all or none, once; and taking them out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .api.client import Cluster, gather
from .names import RUN, SUBMISSION

_GONE_S = 180.0  # at least

Body = Mapping[str, Any]


def is_sent(cluster: Cluster, objects: Sequence[Body], submission: str) -> bool:
    """Whether this submission has sent the last of its objects before, and did not live to hear of it.

    OrchError (65) when an object of one of these names is somebody else's.
    """
    there = [cluster.get(body["kind"], body["metadata"]["name"]) for body in objects]
    if _is_ours(there[-1], submission):
        return True
    for body, found in zip(objects, there, strict=True):
        if found is not None and not _is_ours(found, submission):
            whose = (found["metadata"].get("labels") or {}).get(RUN)
            of = f"run {whose}" if whose else "something else"
            text = f"{body['kind']} {body['metadata']['name']} exists already in {cluster.namespace}, of {of}"
            raise OrchError(text, Exit.CONFIG)
    return False


def send(cluster: Cluster, objects: Sequence[Body], run_id: str, submission: str) -> dict[str, Any]:
    """Server-side apply: the Secret first, the Job last, what is between at once. What was sent goes again when the
    rest is refused. Returns the Job as the server has it. To be called when `is_sent` has said no.

    Every submission is a field manager of its own: a second submitter of the same run meets a conflict at the first
    object, the Secret with its key, before anything has started. A repetition of this one changes nothing.
    """
    tried: list[Body] = []
    try:
        for part in filter(None, (objects[:1], objects[1:-1], objects[-1:])):
            tried += part
            answers = gather(partial(_apply, cluster, body, run_id, submission) for body in part)
    except BaseException:
        for body in reversed(tried):  # the last one too: its answer may have been lost on the way
            with contextlib.suppress(OrchError):
                kind, name = body["kind"], body["metadata"]["name"]
                if _is_ours(cluster.get(kind, name), submission):
                    cluster.delete(kind, name)
        raise
    return answers[0]


def _apply(cluster: Cluster, body: Body, run_id: str, submission: str) -> dict[str, Any]:
    try:
        return cluster.apply(body, _manager(submission))
    except OrchError as error:
        if getattr(error, "status", None) == 409:
            text = f"run {run_id} is being submitted by someone else at this moment: {error.message}"
            raise OrchError(text, Exit.CONFIG) from None
        raise


def _manager(submission: str) -> str:
    return f"orch-{submission}"


def _is_ours(there: Body | None, submission: str) -> bool:
    return there is not None and (there["metadata"].get("annotations") or {}).get(SUBMISSION) == submission


def hand_over(cluster: Cluster, objects: Sequence[Body], main: Body, submission: str) -> None:
    """Everything belongs to the Job from now on: whoever deletes that, or its time to live, removes all of it.

    Without the right to do so nothing is lost but tidiness: `orch` finds the objects by their label.
    """
    owner = {name: objects[-1][name] for name in ("apiVersion", "kind")}
    owner |= {name: main["metadata"][name] for name in ("name", "uid")}

    change = {"metadata": {"ownerReferences": [owner]}}
    for body in objects[:-1]:  # over one connection: another one's handshake costs more, while pods wait for the server
        with contextlib.suppress(OrchError):
            cluster.merge(body["kind"], body["metadata"]["name"], change, _manager(submission))


def remove(cluster: Cluster, kind: str, name: str, run_id: str, wait_s: float = 0.0) -> None:
    """Every object of a run, and wait until its pods are gone: `wait_s` when they have to save before. OrchError (76)
    when they do not go."""
    cluster.delete(kind, name, "Foreground")
    for other in ("Secret", "ConfigMap", "Service", "NetworkPolicy"):
        with contextlib.suppress(OrchError):
            cluster.delete(other, name)
    end = time.monotonic() + max(wait_s, _GONE_S)
    while cluster.get(kind, name) is not None or cluster.list("Pod", f"{RUN}={run_id}"):
        if time.monotonic() > end:
            text = f"pods of run {run_id} do not go: `kubectl get pods -l {RUN}={run_id}` shows where they hang"
            raise OrchError(text, Exit.CAPACITY)
        time.sleep(0.5)
