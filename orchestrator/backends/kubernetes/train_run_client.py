"""`orch` as a client of the controller: a submission is one object, and every later command is a
change of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from orchestrator.backends.base import off_bad_nodes, write_record
from orchestrator.config.passed import PASSED
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.exits import Exit
from orchestrator.run.environment import values_elsewhere
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest, SubmissionBundle, from_bytes, to_bytes
from orchestrator.run.state import RunState, finish, prepare_resume, read_state, write_state
from orchestrator.run.variables import select_variables

from .api.client import Cluster
from .code_store import field_manager, owner_of, store_code
from .names import SUBMISSION, Body, JsonObject, object_name, standard_labels
from .objects.code_maps import code_maps
from .options import KubernetesOptions, read_options
from .record import KubernetesRecord
from .train_run import API_VERSION, Spec, TrainRun, body_of, planned, reference_to

if TYPE_CHECKING:
    from .observer import RunObserver

_ASK_S = 20.0  # how long a submission whose answer was lost is looked up


def has_controller(cluster: Cluster, options: KubernetesOptions) -> bool:
    """Tells whether the cluster has a controller to submit to. OrchError: 65 if one is required and
    absent, 76 if the cluster does not answer."""
    if options.controller == "never" or options.kind == "jobset":
        return False
    installed = cluster.has(API_VERSION)
    if not installed and options.controller == "always":
        message = (
            "backend.options.controller=always: the cluster does not know TrainRuns; install"
            " charts/orch-controller"
        )
        raise OrchError(message, Exit.CONFIG)
    return installed


def submit(
    cluster: Cluster,
    folder: RunFolder,
    bundle: SubmissionBundle,
    plans: Sequence[Plan],
    code: Sequence[Body],
    environ: Mapping[str, str],
) -> None:
    """Creates the TrainRun in one request. If it passes on private variables or a program, it
    creates a draft, which becomes a run once their Secret and the ConfigMaps `code` exist. The run
    folder has the record before: a TrainRun whose answer is lost is found.

    OrchError: 65 if a TrainRun of that name belongs to something else, 76 if it is unknown whether
    it was created, and as `complete_draft`.
    """
    submission = os.urandom(8).hex()
    options = read_options(bundle.request.backend_options)
    unsent = record(bundle.request, options, cluster.namespace, submission, sent=False)
    write_record(folder, unsent, durable=True)
    body, secret = _bodies(bundle, plans, environ, cluster.namespace, submission)
    train_run = _create(cluster, body, submission)
    if body["spec"].get("draft"):
        complete_draft(cluster, train_run, secret, code)
    write_record(folder, structs.replace(unsent, sent=True), durable=True)


def complete_draft(
    cluster: Cluster,
    train_run: JsonObject,
    secret: JsonObject,
    code: Sequence[Body] = (),
) -> None:
    """Stores the private variables and the program of a draft, and makes the draft a run.

    OrchError: that of an object which is refused, and then the draft is deleted; 76 if the
    controller has discarded the draft because its submission took too long.
    """
    owner = owner_of(train_run)
    name = owner["name"]
    completion = {"metadata": {"uid": owner["uid"]}, "spec": {"draft": None}}
    store = partial(store_code, cluster, code, owner, field_manager(owner["uid"]))
    try:
        if secret:
            secret["metadata"]["ownerReferences"] = [owner]
            cluster.create(secret)
        store()
        completed = cluster.change("TrainRun", name, completion)
    except BaseException:
        with contextlib.suppress(OrchError):
            cluster.delete("TrainRun", name)
        raise
    if completed is None:
        message = f"the controller has discarded TrainRun {name}, sent too slowly: submit again"
        raise OrchError(message, Exit.CAPACITY)
    # The last other run with the same program may have been deleted meanwhile, and Kubernetes
    # deletes what it has begun to collect. The controller would report what is missing.
    with contextlib.suppress(OrchError):
        store()


def document(bundle: SubmissionBundle, plans: Sequence[Plan], namespace: str) -> JsonObject:
    """Returns the TrainRun of a bundle for a repository: without the variables of this shell."""
    return _bodies(bundle, plans, {}, namespace, "")[0]


def record(
    request: LaunchRequest,
    options: KubernetesOptions,
    namespace: str,
    submission: str = "",
    sent: bool = True,
) -> KubernetesRecord:
    return KubernetesRecord(
        context=options.context,
        namespace=namespace,
        kind="Job",
        name=object_name(request.run_id, len(request.agents), options.kind),
        submission=submission,
        submitted_at=time.time(),
        sent=sent,
        train_run=request.run_id,
    )


def _bodies(
    bundle: SubmissionBundle,
    plans: Sequence[Plan],
    environ: Mapping[str, str],
    namespace: str,
    submission: str,
) -> tuple[JsonObject, JsonObject]:
    request = bundle.request
    passed = values_elsewhere(request.environment, environ)
    # everybody who may read TrainRuns sees the others
    public = select_variables(
        [name for name in passed if name not in request.environment.required],
        in_full=(),
        patterns=PASSED,
    )
    plain = {name: passed[name] for name in public.passed}
    private = {name: value for name, value in passed.items() if name not in plain}
    name = f"{request.run_id}-env"
    is_draft = bool(submission) and bool(private or request.code.packed)
    spec = Spec(planned=planned(bundle, plans), environment=plain, draft=is_draft)
    if private:
        spec = structs.replace(spec, environment_secret=name)
    annotations = {SUBMISSION: submission} if submission else {}
    body = body_of(
        request.run_id,
        namespace,
        spec,
        annotations,
        standard_labels(request.run_id),
    )
    if not namespace:
        del body["metadata"]["namespace"]
    if not private:
        return body, {}
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": standard_labels(request.run_id),
    }
    return body, {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": private,
    }


def _create(cluster: Cluster, body: JsonObject, submission: str) -> JsonObject:
    name = body["metadata"]["name"]
    end = time.monotonic() + _ASK_S
    while True:
        try:
            existing = cluster.create(body) or cluster.get("TrainRun", name)
        except OrchError as error:
            if getattr(error, "status", None) is not None or time.monotonic() > end:
                raise
            existing = None  # the answer was lost, perhaps after the object was created
        if existing is None:
            time.sleep(0.5)
            continue
        annotations = existing["metadata"].get("annotations") or {}
        if annotations.get(SUBMISSION) == submission:
            return existing
        message = f"TrainRun {name} exists already in namespace {cluster.namespace}"
        raise OrchError(message, Exit.CONFIG)


# --------------------------------------------------------------------------- requests to a run


def read(cluster: Cluster, name: str) -> TrainRun | None:
    """Reads the TrainRun, or None. OrchError (65) for one of another version."""
    body = cluster.get("TrainRun", name)
    if body is None:
        return None
    try:
        return msgspec.convert(body, TrainRun)
    except UNREADABLE as error:
        raise OrchError(f"TrainRun {name} is of another version: {error}", Exit.CONFIG) from None


def read_all(cluster: Cluster) -> list[TrainRun]:
    """Reads the TrainRuns of every namespace if that is permitted, else of our own."""
    for kind in ("AllTrainRuns", "TrainRun"):
        try:
            return list(cluster.read(kind, TrainRun))
        except OrchError as error:
            if getattr(error, "status", None) != 403 or kind == "TrainRun":
                raise
    return []


def state_of(run: TrainRun | None, last_state: RunState) -> RunState:
    """Returns the run's state as its controller reports it. `last_state`: the state in the run
    folder here."""
    if run is None:
        if last_state.is_final:
            return last_state
        return finish(
            last_state,
            "stopped",
            Exit.RESTART,
            "its TrainRun was deleted",
            at=time.time(),
        )
    status = run.status
    state = last_state
    if status.run:
        with contextlib.suppress(*UNREADABLE):
            state = msgspec.convert(status.run, RunState)
    summary = {**last_state.summary, **state.summary}
    state = structs.replace(state, created_at=last_state.created_at, summary=summary)
    if not status.observed_generation:
        return structs.replace(state, reason="no controller has taken it up yet")
    phase = status.state
    if run.spec.stopped and not status.over:
        phase = "stopping"
    reason = status.reason or state.reason
    if status.attempt != run.spec.attempt:
        phase = "pending"
        reason = "asked to start again"
    code = status.exit_code if phase == status.state else None
    ended = state.ended_at if phase in ("done", "failed", "cancelled", "stopped") else None
    return structs.replace(
        state,
        state=phase,
        reason=reason,
        exit_code=code,
        ended_at=ended,
    )


def change(cluster: Cluster, name: str, **spec: Any) -> None:
    """Changes the TrainRun's spec. OrchError (64) if the run is gone."""
    if cluster.change("TrainRun", name, {"spec": spec}) is None:
        raise _gone(name, cluster.namespace)


def _gone(name: str, namespace: str | None) -> OrchError:
    return OrchError(f"TrainRun {name} is gone from namespace {namespace}", Exit.USAGE)


class ControlledRuns:
    """Sends commands to runs that a controller manages. `cluster(record)`; `observer()`: the
    current observer."""

    def __init__(
        self,
        cluster: Callable[[KubernetesRecord], Cluster],
        observer: Callable[[], RunObserver],
    ):
        self._cluster = cluster
        self._observer = observer

    def resume(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        record: KubernetesRecord | None,
        environ: Mapping[str, str],
    ) -> None:
        assert record is not None
        self._start_again(folder, record)
        prepare_resume(folder)

    def resize(
        self,
        folder: RunFolder,
        request: LaunchRequest,
        record: KubernetesRecord | None,
        nodes: int,
        environ: Mapping[str, str],
    ) -> None:
        """Asks for that size; a running run saves first."""
        assert record is not None
        self._start_again(folder, record, nodes)

    def cancel(self, folder: RunFolder, record: KubernetesRecord, force: bool) -> None:
        """Asks the run to end. OrchError (64) if it is not running."""
        cluster = self._cluster(record)
        run = self._read(record)
        if run is None or run.is_over:
            raise OrchError(f"run {folder.run_id} is not running", Exit.USAGE)
        change(cluster, record.train_run, stopped=True, force=force or None)

    def is_alive(self, folder: RunFolder, record: KubernetesRecord) -> bool:
        """Tells whether the run is not over yet, or pods of it still run."""
        run = self._read(record)
        return run is not None and (not run.is_over or run.status.running_nodes > 0)

    def state(self, folder: RunFolder, record: KubernetesRecord) -> RunState:
        """Reads the state from the controller, which keeps what the coordinator last wrote; the
        pods' logs, if they may be read, hold more. OrchError if no cluster answers."""
        from .observer import remember_bad_nodes, save_last_report

        run = self._read(record)
        if run is not None and not run.is_over:
            with contextlib.suppress(OrchError, OSError):
                save_last_report(folder, self._observer().last_report(record, folder.run_id))
        last_state = read_state(folder)
        state = state_of(run, last_state)
        with contextlib.suppress(OSError):  # a full disk: the cluster still has it
            remember_bad_nodes(folder, last_state, state)
            if state != last_state:
                write_state(folder, state)
        return state

    def _read(self, record: KubernetesRecord) -> TrainRun | None:
        """Reads the TrainRun of the record. One whose submission got no last answer may be another
        of the same name."""
        run = read(self._cluster(record), record.train_run)
        if run is None or record.sent:
            return run
        return run if run.metadata.annotations.get(SUBMISSION) == record.submission else None

    def _start_again(
        self,
        folder: RunFolder,
        record: KubernetesRecord,
        nodes: int | None = None,
    ) -> None:
        """Starts a run that has ended once more, without the nodes that are bad today. OrchError
        (64) if it is gone."""
        run = self._read(record)
        if run is None:
            raise _gone(record.train_run, record.namespace)
        self._store_code(folder, record, run)
        changes: JsonObject = {"nodes": nodes} if nodes is not None else {}
        if run.status.over or run.spec.stopped:
            changes |= {
                "attempt": run.status.attempt + 1,
                "stopped": None,
                "force": None,
            }
            if run.spec.planned is not None:
                request = off_bad_nodes(folder, from_bytes(run.spec.planned.request.encode()))
                changes["planned"] = {"request": to_bytes(request).decode()}
        change(self._cluster(record), record.train_run, **changes)

    def _store_code(self, folder: RunFolder, record: KubernetesRecord, run: TrainRun) -> None:
        """Stores the run's program once more if this machine has it and the cluster lost it."""
        if run.spec.planned is None or not folder.packed_code.exists():
            return
        packed = from_bytes(run.spec.planned.request.encode()).code.packed
        if not packed:
            return
        cluster = self._cluster(record)
        maps = code_maps(packed, folder.packed_code.read_bytes(), cluster.namespace)
        owner = reference_to(run)
        store_code(cluster, maps, owner, field_manager(owner["uid"]))
