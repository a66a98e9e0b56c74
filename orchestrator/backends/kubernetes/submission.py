"""Creates a run's objects in the cluster, all or none; for `submit`, `resume` and `resize`.

What may refuse comes before anything is sent. Requests that do not wait for one another go out at
once: a run of eight pods is bound a tenth of a second after its Job has arrived, so every request
before that is felt.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec import structs

from orchestrator.backends.base import write_record
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest
from orchestrator.run.variables import PASSED

from .api.client import PATHS, Cluster, gather, in_background, kind_of
from .cluster_view import ClusterSnapshot, Reservation, reserve_nodes
from .names import RUN, SUBMISSION, object_name
from .objects.gang import resolved
from .objects.render import NO_KEY, Manifest, elastic_sizes, render
from .options import KubernetesOptions, read_options
from .record import KubernetesRecord

#: Variables of the submitting machine that mean nothing, or something else, inside a pod.
OF_THIS_MACHINE = PASSED - {
    "LANG",
    "LANGUAGE",
    "TZ",
    "PYTHONHASHSEED",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER",
}
_DELETION_S = 180.0  # at least; for the pods of a run to be gone
_TRUSTED_S = 2.0  # that names are free; others may have held the placement lock since


def draft_objects(request: LaunchRequest, plan: Plan) -> list[dict[str, Any]]:
    """The objects of a run without its key, nodes and topology, which are known when they are sent.
    OrchError (65)."""
    options = read_options(request.backend_options)
    return render(
        Manifest(
            request=request,
            plan=plan,
            options=options,
            config=b"",
            namespace=options.namespace or "",
        )
    )


def submit_objects(
    cluster: Cluster,
    folder: RunFolder,
    request: LaunchRequest,
    plan: Plan,
    environ: Mapping[str, str],
    generation: int,
    drafts: Sequence[Mapping[str, Any]],
    snapshot: Future[ClusterSnapshot] | None = None,
) -> None:
    """Choose nodes and send the objects. `drafts`: of `draft_objects`; `snapshot`: of
    `read_snapshot`, begun before.

    OrchError: 65 for objects of the same names or refused ones, 76 without room, 78 without a
    right.
    """
    options, submission = _resolve_owner(
        cluster, read_options(request.backend_options), folder.run_id
    )
    options = (
        structs.replace(options, gang=resolved(options, cluster.has))
        if options.gang != "none"
        else options
    )
    record = record_of(request, options, cluster.namespace, submission, generation)
    if is_sent(cluster, drafts, submission):
        write_record(folder, structs.replace(record, sent=True), durable=True)
        return
    free_at = time.monotonic()
    write_record(folder, record, durable=True)
    with reserve_nodes(cluster, plan, options, folder.run_id, snapshot) as found:
        for line in found.warnings:
            print(f"orch: warning: {line}", file=sys.stderr)
        objects = render(
            manifest_of(
                folder,
                request,
                plan,
                options,
                environ,
                cluster.namespace,
                submission,
                generation,
                found,
            )
        )
        if time.monotonic() > free_at + _TRUSTED_S:
            is_sent(cluster, drafts, submission)
        main = apply_all(cluster, objects, folder.run_id, submission, found.check)
        owned = in_background(
            lambda: set_owner(cluster, objects, main, submission)
        )  # while the placement lock is given back
    write_record(folder, structs.replace(record, sent=True), durable=True)
    owned.result()


def _resolve_owner(
    cluster: Cluster, options: KubernetesOptions, run_id: str
) -> tuple[KubernetesOptions, str]:
    """The options with their owner's uid, and what this submission is known by.

    Of an owner there is one submission, however often a launcher that lost its connection tries
    again.
    """
    owner = options.owner
    if owner is None:
        return options, os.urandom(8).hex()
    if not owner.uid:
        found = cluster.get("ConfigMap", owner.name)
        if found is None:
            text = (
                f"backend.options.owner: no ConfigMap {owner.name} in namespace {cluster.namespace}"
            )
            raise OrchError(text, Exit.CONFIG)
        owner = structs.replace(owner, uid=found["metadata"]["uid"])
        options = structs.replace(options, owner=owner)
    return options, hashlib.sha256(f"{owner.uid} {run_id}".encode()).hexdigest()[:16]


def manifest_of(
    folder: RunFolder,
    request: LaunchRequest,
    plan: Plan,
    options: KubernetesOptions,
    environ: Mapping[str, str],
    namespace: str,
    submission: str = "",
    generation: int = 0,
    found: Reservation | None = None,
) -> Manifest:
    """With the run's own key, and the values of variables that are passed on."""
    key = folder.key.read_text().strip() if folder.key.exists() else NO_KEY
    passed = {
        n: environ[n]
        for n in request.environment.names
        if n in environ and n not in OF_THIS_MACHINE
    }
    return Manifest(
        request=request,
        plan=plan,
        options=options,
        config=folder.config.read_bytes(),
        namespace=namespace,
        key=key,
        environment=passed,
        topology=found.topology if found else None,
        chosen=found.chosen if found else None,
        excluded=found.excluded if found else None,
        submission=submission,
        generation=generation,
        sizes={
            size: load_plan(folder.sized_plan(size)) for size in elastic_sizes(request, options)
        },
    )


def record_of(
    request: LaunchRequest,
    options: KubernetesOptions,
    namespace: str,
    submission: str = "",
    generation: int = 0,
) -> KubernetesRecord:
    return KubernetesRecord(
        context=options.context,
        namespace=namespace,
        kind="JobSet" if options.kind == "jobset" else "Job",
        name=object_name(request.run_id, len(request.agents), options.kind),
        submission=submission,
        submitted_at=time.time(),
        generation=generation,
    )


# ----------------------------------------------------------------------------------- all or nothing


def is_sent(cluster: Cluster, objects: Sequence[Mapping[str, Any]], submission: str) -> bool:
    """Whether the last object of this submission is in the cluster already: sent by a try that
    never heard of it.

    OrchError (65) when an object of one of these names is somebody else's.
    """
    there = [cluster.get(kind_of(body), body["metadata"]["name"]) for body in objects]
    if _is_ours(there[-1], submission):
        return True
    for body, found in zip(objects, there, strict=True):
        if found is not None and not _is_ours(found, submission):
            whose = (found["metadata"].get("labels") or {}).get(RUN)
            of = f"run {whose}" if whose else "something else"
            text = (
                f"{body['kind']} {body['metadata']['name']} exists already in {cluster.namespace},"
                f" of {of}"
            )
            raise OrchError(text, Exit.CONFIG)
    return False


def apply_all(
    cluster: Cluster,
    objects: Sequence[Mapping[str, Any]],
    run_id: str,
    submission: str,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Server-side apply: the Secret first, the Job last, what is between at once. What was sent
    goes again when the rest is refused, or `check` raises, which is called before each part and
    after the last one. Returns the Job as the server has it. To be called when `is_sent` has report
    no.

    Every submission is a field manager of its own: a second submitter of the same run meets a
    conflict at the first object, the Secret with its key, before anything has started. A repetition
    of this one changes nothing.
    """
    tried: list[Mapping[str, Any]] = []
    try:
        for part in filter(None, (objects[:1], objects[1:-1], objects[-1:])):
            check()
            tried += part
            answers = gather(partial(_apply, cluster, body, run_id, submission) for body in part)
        check()
    except BaseException:
        for body in reversed(tried):  # the last one too: its answer may have been lost on the way
            try:
                kind = kind_of(body)
                name = body["metadata"]["name"]
                if _is_ours(cluster.get(kind, name), submission):
                    cluster.delete(kind, name)
            except OrchError as error:
                if getattr(error, "status", None) is None:
                    # no answer: the others would be waited for as long; `cancel` and `status` clear
                    # up
                    break
        raise
    return answers[0]


def _apply(
    cluster: Cluster, body: Mapping[str, Any], run_id: str, submission: str
) -> dict[str, Any]:
    try:
        return cluster.apply(body, _manager(submission))
    except OrchError as error:
        if getattr(error, "status", None) == 409:
            text = (
                f"run {run_id} is being submitted by someone else at this moment: {error.message}"
            )
            raise OrchError(text, Exit.CONFIG) from None
        raise


def _manager(submission: str) -> str:
    return f"orch-{submission}"


def _is_ours(there: Mapping[str, Any] | None, submission: str) -> bool:
    return (
        there is not None
        and (there["metadata"].get("annotations") or {}).get(SUBMISSION) == submission
    )


def set_owner(
    cluster: Cluster, objects: Sequence[Mapping[str, Any]], main: Mapping[str, Any], submission: str
) -> None:
    """Make the Job the owner of the other objects: whoever deletes it, or its time to live, removes
    all of them.

    Without the right to do so nothing is lost but tidiness: `orch` finds the objects by their
    label.
    """
    owner = {name: objects[-1][name] for name in ("apiVersion", "kind")}
    owner |= {name: main["metadata"][name] for name in ("name", "uid")}

    change = {"metadata": {"ownerReferences": [owner]}}
    for body in objects[
        :-1
    ]:  # over one connection: another one's handshake costs more, while pods wait for the server
        with contextlib.suppress(OrchError):
            cluster.merge(kind_of(body), body["metadata"]["name"], change, _manager(submission))


def delete_remains(cluster: Cluster, record: KubernetesRecord) -> list[str]:
    """Delete what a submission killed before its Job has left, and nothing of any other. Returns
    what it was."""
    if record.sent or not record.submission or cluster.get(record.kind, record.name) is not None:
        return []
    gone = []
    for kind in ("Service", "NetworkPolicy", "ConfigMap", "Secret"):
        if _is_ours(cluster.get(kind, record.name), record.submission) and cluster.delete(
            kind, record.name
        ):
            gone.append(f"{kind} {record.name}")
    return gone


def delete_run_objects(
    cluster: Cluster, kind: str, name: str, run_id: str, wait_s: float = 0.0
) -> None:
    """Delete every object of a run, and wait until its pods are gone; at least `wait_s`, for them
    to save.

    OrchError (76) when they are not gone by then.
    """
    cluster.delete(kind, name, "Foreground")
    groups = [kind for kind in PATHS if kind.startswith(("PodGroup ", "Workload "))]
    for other in ("Secret", "ConfigMap", "Service", "NetworkPolicy", *groups):
        with contextlib.suppress(OrchError):
            cluster.delete(other, name)
    end = time.monotonic() + max(wait_s, _DELETION_S)
    while cluster.get(kind, name) is not None or cluster.list("Pod", f"{RUN}={run_id}"):
        if time.monotonic() > end:
            text = (
                f"pods of run {run_id} do not go: `kubectl get pods -l {RUN}={run_id}` shows where"
                " they hang"
            )
            raise OrchError(text, Exit.CAPACITY)
        time.sleep(0.5)
