"""Creates a run's objects in the cluster, all or none, for `submit`, `resume` and `resize`.

Every check that may refuse comes before anything is sent. Requests that do not depend on one
another go out at once: the pods of a run of eight are bound a tenth of a second after its Job has
arrived, so users feel every request before that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from msgspec import structs

from orchestrator.backends.base import write_record
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.run.environment import values_elsewhere
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest

from .api.client import PATHS, Cluster, gather, in_background, kind_of
from .cluster_view import ClusterSnapshot, Reservation, reserve_nodes
from .code_store import field_manager, owner_of, store_code
from .names import RUN, SUBMISSION, Body, JsonObject, object_name
from .objects.code_maps import code_maps
from .objects.gang import resolved
from .objects.render import NO_KEY, Manifest, elastic_sizes, render, secret
from .options import KubernetesOptions, read_options
from .record import KubernetesRecord

_DELETION_S = 180.0  # shortest wait for the pods of a run to be gone
# how long a check that names are free holds while others may take the placement lock
_TRUSTED_S = 2.0


def draft_objects(request: LaunchRequest, plan: Plan) -> list[JsonObject]:
    """Renders the objects of a run without its key, nodes and topology, which are known only when
    they are sent. OrchError (65)."""
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
    *,
    generation: int,
    drafts: Sequence[Body],
    snapshot: Future[ClusterSnapshot] | None = None,
) -> None:
    """Chooses nodes and sends the objects. `drafts`: the result of `draft_objects`; `snapshot`: a
    `read_snapshot` in progress.

    OrchError: 65 if objects of the same names exist or one is refused, 76 without free nodes, 78
    without permission.
    """
    options = read_options(request.backend_options)
    options, submission = _resolve_owner(cluster, options, folder.run_id)
    if options.gang != "none":
        options = structs.replace(options, gang=resolved(options, cluster.has))
    record = record_of(request, options, cluster.namespace, submission, generation)
    if is_sent(cluster, drafts, submission):
        write_record(folder, structs.replace(record, sent=True), durable=True)
        return
    free_at = time.monotonic()
    write_record(folder, record, durable=True)
    manifest = manifest_of(
        folder,
        request,
        plan,
        options,
        environ,
        namespace=cluster.namespace,
        submission=submission,
        generation=generation,
    )
    with (
        stored_code(cluster, folder, manifest) as store_code_again,
        reserve_nodes(cluster, plan, options, folder.run_id, snapshot) as reservation,
    ):
        for warning in reservation.warnings:
            print(f"orch: warning: {warning}", file=sys.stderr)
        objects = render(on_nodes(manifest, reservation))
        if time.monotonic() > free_at + _TRUSTED_S:
            is_sent(cluster, drafts, submission)
        main = apply_all(
            cluster,
            objects,
            folder.run_id,
            submission,
            reservation.check,
        )

        def finish() -> None:
            set_owner(cluster, objects, main, submission)
            store_code_again()

        owned = in_background(finish)  # while the placement lock is given back
    write_record(folder, structs.replace(record, sent=True), durable=True)
    owned.result()


@contextlib.contextmanager
def stored_code(
    cluster: Cluster,
    folder: RunFolder,
    manifest: Manifest,
) -> Iterator[Callable[[], None]]:
    """Stores a program that travels before the body, and deletes what was sent if the body raises.
    Yields what stores it once more where it has vanished since: the last other run with the same
    code may have been deleted, and Kubernetes deletes what it began to collect.

    This is done before nodes are reserved, because it may take longer than they can be. The run's
    Secret, which owns the code, is therefore sent first.
    """
    packed = manifest.request.code.packed
    if not packed:
        yield lambda: None
        return
    maps = code_maps(packed, folder.packed_code.read_bytes(), cluster.namespace)
    run_secret = secret(manifest)
    try:
        sent = _apply(cluster, run_secret, folder.run_id, manifest.submission)
        store = partial(
            store_code,
            cluster,
            maps,
            owner_of(sent),
            field_manager(manifest.submission),
        )
        store()
        yield store
    except BaseException:
        _delete_sent(cluster, [run_secret], manifest.submission)
        raise


def _resolve_owner(
    cluster: Cluster,
    options: KubernetesOptions,
    run_id: str,
) -> tuple[KubernetesOptions, str]:
    """Returns the options with their owner's uid, and the id of this submission.

    An owner has one submission, however often a launcher that lost its connection tries again.
    """
    owner = options.owner
    if owner is None:
        return options, os.urandom(8).hex()
    if not owner.uid:
        config_map = cluster.get("ConfigMap", owner.name)
        if config_map is None:
            message = (
                f"backend.options.owner: no ConfigMap {owner.name} in namespace {cluster.namespace}"
            )
            raise OrchError(message, Exit.CONFIG)
        owner = structs.replace(owner, uid=config_map["metadata"]["uid"])
        options = structs.replace(options, owner=owner)
    return options, hashlib.sha256(f"{owner.uid} {run_id}".encode()).hexdigest()[:16]


def manifest_of(
    folder: RunFolder,
    request: LaunchRequest,
    plan: Plan,
    options: KubernetesOptions,
    environ: Mapping[str, str],
    *,
    namespace: str,
    submission: str = "",
    generation: int = 0,
) -> Manifest:
    """Collects what the objects are rendered from, before nodes are reserved: the run's key, and
    the values of variables that are passed on, among it."""
    key = folder.key.read_text().strip() if folder.key.exists() else NO_KEY
    elastic = elastic_sizes(request, options)
    return Manifest(
        request=request,
        plan=plan,
        options=options,
        config=folder.config.read_bytes(),
        namespace=namespace,
        key=key,
        environment=values_elsewhere(request.environment, environ),
        submission=submission,
        generation=generation,
        sizes={size: load_plan(folder.sized_plan(size)) for size in elastic},
    )


def on_nodes(manifest: Manifest, reservation: Reservation) -> Manifest:
    """Returns the manifest of the same run on the reserved nodes."""
    return structs.replace(
        manifest,
        topology=reservation.topology,
        chosen=reservation.chosen,
        excluded=reservation.excluded,
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


def is_sent(cluster: Cluster, objects: Sequence[Body], submission: str) -> bool:
    """Tells whether the last object of this submission is in the cluster already, sent by a try
    that never got the answer.

    OrchError (65) if an object of one of these names belongs to something else.
    """
    existing_bodies = [cluster.get(kind_of(body), body["metadata"]["name"]) for body in objects]
    if _is_ours(existing_bodies[-1], submission):
        return True
    for body, existing in zip(objects, existing_bodies, strict=True):
        if existing is not None and not _is_ours(existing, submission):
            run_id = (existing["metadata"].get("labels") or {}).get(RUN)
            owner = f"run {run_id}" if run_id else "something else"
            name = f"{body['kind']} {body['metadata']['name']}"
            message = f"{name} exists already in {cluster.namespace}, of {owner}"
            raise OrchError(message, Exit.CONFIG)
    return False


def apply_all(
    cluster: Cluster,
    objects: Sequence[Body],
    run_id: str,
    submission: str,
    check: Callable[[], None] = lambda: None,
) -> JsonObject:
    """Sends the objects by server-side apply: the Secret first, the Job last, the others at once in
    between. If one is refused, or `check` raises, what was sent is deleted again; `check` is called
    before each batch and after the last. Returns the Job as the server has it. The caller has made
    sure that `is_sent` is false.

    Every submission is a field manager of its own: a second submitter of the same run meets a
    conflict at the first object, the Secret with its key, before anything has started. A repetition
    of this submission changes nothing.
    """
    tried: list[Body] = []
    try:
        for batch in filter(None, (objects[:1], objects[1:-1], objects[-1:])):
            check()
            tried += batch
            answers = gather(partial(_apply, cluster, body, run_id, submission) for body in batch)
        check()
    except BaseException:
        # the last one too: its answer may have been lost on the way
        _delete_sent(cluster, tried, submission)
        raise
    return answers[0]


def _delete_sent(cluster: Cluster, tried: Sequence[Body], submission: str) -> None:
    for body in reversed(tried):
        try:
            kind = kind_of(body)
            name = body["metadata"]["name"]
            if _is_ours(cluster.get(kind, name), submission):
                cluster.delete(kind, name)
        except OrchError as error:
            # no answer: the other requests would wait as long; `cancel` and `status` clean up
            if getattr(error, "status", None) is None:
                return


def _apply(cluster: Cluster, body: Body, run_id: str, submission: str) -> JsonObject:
    try:
        return cluster.apply(body, field_manager(submission))
    except OrchError as error:
        if getattr(error, "status", None) == 409:
            message = (
                f"run {run_id} is being submitted by someone else at this moment: {error.message}"
            )
            raise OrchError(message, Exit.CONFIG) from None
        raise


def _is_ours(existing: Body | None, submission: str) -> bool:
    if existing is None:
        return False
    annotations = existing["metadata"].get("annotations") or {}
    return bool(annotations.get(SUBMISSION) == submission)


def set_owner(
    cluster: Cluster,
    objects: Sequence[Body],
    main: Body,
    submission: str,
) -> None:
    """Makes the Job the owner of the other objects, so that its deletion, or its time to live,
    removes all of them.

    Without the permission only tidiness is lost: `orch` finds the objects by their label.
    """
    owner = {name: objects[-1][name] for name in ("apiVersion", "kind")}
    owner |= {name: main["metadata"][name] for name in ("name", "uid")}

    change = {"metadata": {"ownerReferences": [owner]}}
    # over one connection: another one's handshake costs more, while pods wait for the server
    for body in objects[:-1]:
        with contextlib.suppress(OrchError):
            cluster.merge(
                kind_of(body),
                body["metadata"]["name"],
                change,
                field_manager(submission),
            )


def delete_remains(cluster: Cluster, record: KubernetesRecord) -> list[str]:
    """Deletes what a submission left that was killed before its Job, and nothing of any other.
    Returns what it deleted."""
    if record.sent or not record.submission or cluster.get(record.kind, record.name) is not None:
        return []
    deleted = []
    for kind in ("Service", "NetworkPolicy", "ConfigMap", "Secret"):
        ours = _is_ours(cluster.get(kind, record.name), record.submission)
        if ours and cluster.delete(kind, record.name):
            deleted.append(f"{kind} {record.name}")
    return deleted


def delete_run_objects(
    cluster: Cluster,
    kind: str,
    name: str,
    run_id: str,
    wait_s: float = 0.0,
) -> None:
    """Deletes every object of a run, and waits until its pods are gone, at least `wait_s` for them
    to save.

    OrchError (76) if they are not gone by then.
    """
    cluster.delete(kind, name, "Foreground")
    groups = [kind for kind in PATHS if kind.startswith(("PodGroup ", "Workload "))]
    for companion_kind in ("Secret", "ConfigMap", "Service", "NetworkPolicy", *groups):
        with contextlib.suppress(OrchError):
            cluster.delete(companion_kind, name)
    end = time.monotonic() + max(wait_s, _DELETION_S)
    while cluster.get(kind, name) is not None or cluster.list("Pod", f"{RUN}={run_id}"):
        if time.monotonic() > end:
            message = (
                f"pods of run {run_id} do not go: `kubectl get pods -l {RUN}={run_id}` shows where"
                " they hang"
            )
            raise OrchError(message, Exit.CAPACITY)
        time.sleep(0.5)
