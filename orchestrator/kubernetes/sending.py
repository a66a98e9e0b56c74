"""Putting a run's objects into the cluster, all or none, once; and taking them out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .client import Cluster
from .names import RUN, SUBMISSION

_GONE_S = 180.0  # at least


def send(cluster: Cluster, objects: Sequence[Mapping[str, Any]], run_id: str, submission: str) -> None:
    """Server-side apply, the Job last. What was sent goes again when the rest is refused.

    Every submission is a field manager of its own: a second submitter of the same run meets a conflict at the first
    object, the Secret with its key, before anything has started. A repetition of this one changes nothing.
    """
    manager, main = f"orch-{submission}", objects[-1]
    if _is_ours(cluster.get(main["kind"], main["metadata"]["name"]), submission):
        return  # sent before, by a submitter that did not live to hear of it
    tried: list[Mapping[str, Any]] = []
    try:
        for body in objects:
            tried.append(body)
            _apply(cluster, body, manager, run_id, submission)
    except BaseException:
        for body in reversed(tried):  # the last one too: its answer may have been lost on the way
            with contextlib.suppress(OrchError):
                kind, name = body["kind"], body["metadata"]["name"]
                if _is_ours(cluster.get(kind, name), submission):
                    cluster.delete(kind, name)
        raise
    _hand_over(cluster, objects, manager)


def _apply(cluster: Cluster, body: Mapping[str, Any], manager: str, run_id: str, submission: str) -> None:
    kind, name = body["kind"], body["metadata"]["name"]
    there = cluster.get(kind, name)
    if there is not None and not _is_ours(there, submission):
        whose = (there["metadata"].get("labels") or {}).get(RUN)
        of = f"run {whose}" if whose else "something else"
        raise OrchError(f"{kind} {name} exists already in {cluster.namespace}, of {of}", Exit.CONFIG)
    try:
        cluster.apply(body, manager)
    except OrchError as error:
        if getattr(error, "status", None) == 409:
            text = f"run {run_id} is being submitted by someone else at this moment: {error.message}"
            raise OrchError(text, Exit.CONFIG) from None
        raise


def _is_ours(there: Mapping[str, Any] | None, submission: str) -> bool:
    return there is not None and (there["metadata"].get("annotations") or {}).get(SUBMISSION) == submission


def _hand_over(cluster: Cluster, objects: Sequence[Mapping[str, Any]], manager: str) -> None:
    """Everything belongs to the Job from now on: whoever deletes that, or its time to live, removes all of it.

    Without the right to do so nothing is lost but tidiness: `orch` finds the objects by their label.
    """
    main = objects[-1]
    with contextlib.suppress(OrchError):
        found = cluster.get(main["kind"], main["metadata"]["name"])
        owner = {name: main[name] for name in ("apiVersion", "kind")}
        owner |= {"name": main["metadata"]["name"], "uid": found["metadata"]["uid"]}
        for body in objects[:-1]:
            owned = {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}
            cluster.apply(owned, manager)


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
