"""The `TrainRun` resource: what a user wants to have trained, and what the controller reports of
it. Pure.

The schema of spec and status for the API server is in
`charts/orch-controller/files/trainruns.yaml`; a test keeps the two equal. What was planned
elsewhere (`orch submit`) travels whole in the spec, so that one request makes a run or none.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from orchestrator.errors import OrchError
from orchestrator.plan import Plan, PlanError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import LaunchRequest, SubmissionBundle, from_bytes, to_bytes
from orchestrator.run.state import FINAL, Phase

from .names import GROUP, KIND, VERSION, JsonObject
from .objects.payload import pack_plan, unpack_plan

API_VERSION = f"{GROUP}/{VERSION}"
MOST_BYTES = 1_000_000  # largest `planned` in one object (etcd takes 1.5 MiB)


class Meta(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The fields of an object's metadata that orch uses."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


class Planned(Struct, frozen=True):
    """A submission that was planned where it was made: request and configuration as text, plans
    packed in base64."""

    request: str
    config: str
    plans: list[str]  # one per size, largest first


class Spec(Struct, frozen=True, rename="camel"):
    words: list[str] = []  # words of `orch submit`: cluster=..., parallel=...
    program: list[str] = []  # the words after `--`
    options: dict[str, Any] = {}  # backend.options
    planned: Planned | None = None  # instead of words
    environment: dict[str, str] = {}  # variables for the run's processes
    environment_secret: str = ""  # a Secret of the run's namespace with more, private variables
    draft: bool = False  # its submission is not complete; a draft that stays one is deleted
    nodes: int | None = None  # one of the run's sizes, instead of the largest that fits
    priority: int = 0  # waiting runs of a higher priority are placed first
    attempt: int = 0  # raising it starts a run that has ended once more
    stopped: bool = False  # it is to end, after saving
    force: bool = False  # ... without saving


class Condition(Struct, frozen=True, rename="camel"):
    type: str
    status: str  # True, False
    reason: str
    message: str = ""
    last_transition_time: str = ""


class Status(Struct, frozen=True, rename="camel", omit_defaults=True):
    observed_generation: int = 0
    attempt: int = 0  # the spec's attempt that this status describes
    inputs: str = ""  # digest of what the plan in force was made from
    state: Phase = "pending"
    reason: str = ""
    exit_code: int | None = None
    plan_hash: str = ""
    wanted_nodes: int = 0
    running_nodes: int = 0
    nodes: str = ""  # "7/8"
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    ettr: float | None = None  # effective training time ratio since the first start
    generation: int = -1  # the Job's: one higher with each start
    ended_generation: int = -1  # the last generation whose end is reported here
    restarts: int = 0  # restarts of all workers, over all starts
    lost_pods: int = 0  # pods that were replaced, over all starts
    started_at: str = ""
    ended_at: str = ""
    last_step_at: str = ""
    wait_until: str = ""  # not placed again before this time, because its last start failed
    fails: int = 0  # consecutive failed starts; they determine how long it waits
    run: dict[str, Any] = {}  # orchestrator.run.state.RunState, as the coordinator last wrote it
    conditions: list[Condition] = []

    @property
    def over(self) -> bool:
        return self.state in FINAL


class TrainRun(Struct, frozen=True):
    metadata: Meta
    spec: Spec = Spec()
    status: Status = field(default_factory=Status)

    @property
    def key(self) -> str:
        return self.metadata.key

    @property
    def inputs(self) -> str:
        """A digest of what the plan is made from; another digest means another plan of the same
        run."""
        spec = self.spec
        planning = (spec.words, spec.program, spec.options, spec.planned)
        encoded = msgspec.json.encode(planning, order="deterministic")
        return hashlib.sha256(encoded).hexdigest()[:16]

    @property
    def is_over(self) -> bool:
        """Tells whether the run has ended and nobody has asked for another attempt since."""
        status = self.status
        if not status.over or status.attempt != self.spec.attempt:
            return False
        same_inputs = status.inputs in ("", self.inputs)
        return same_inputs and (status.state != "cancelled" or self.spec.stopped)


class Bundle(Struct, frozen=True):
    """What a run is rendered from."""

    request: LaunchRequest
    config: bytes
    plans: dict[int, Plan]  # number of nodes with ranks -> plan

    @property
    def largest(self) -> Plan:
        return self.plans[max(self.plans)]


def planned(bundle: SubmissionBundle, plans: Sequence[Plan]) -> Planned:
    """Packs a bundle for the spec. OrchError (65) if it is too large for one object."""
    packed = Planned(
        request=to_bytes(bundle.request).decode(),
        config=bundle.contents["config.yaml"].decode(),
        plans=[base64.b64encode(pack_plan(plan)).decode() for plan in plans],
    )
    size = len(msgspec.json.encode(packed))
    if size > MOST_BYTES:
        message = (
            f"the run's plans would make an object of {size} bytes, Kubernetes takes {MOST_BYTES}:"
            " ask for fewer sizes"
        )
        raise OrchError(message, Exit.CONFIG)
    return packed


def unpacked(packed: Planned) -> Bundle:
    """Unpacks what `planned` packed. OrchError (65) if it was packed by something else, or by
    another version."""
    from orchestrator.planner.placement.rank_assignment import used_node_count

    try:
        plans = [unpack_plan(base64.b64decode(plan, validate=True)) for plan in packed.plans]
        request = from_bytes(packed.request.encode())
    except (PlanError, ValueError) as error:
        raise OrchError(f"spec.planned: {error}", Exit.CONFIG) from None
    if not plans:
        raise OrchError("spec.planned.plans is empty", Exit.CONFIG)
    by_nodes = {used_node_count(plan): plan for plan in plans}
    return Bundle(request, packed.config.encode(), by_nodes)


def body_of(
    name: str,
    namespace: str,
    spec: Spec,
    annotations: dict[str, str],
    labels: dict[str, str],
) -> dict[str, Any]:
    """Builds the object as it is sent: of the spec only the fields that differ from the default."""
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "labels": labels}
    if annotations:
        metadata["annotations"] = annotations
    fields = msgspec.to_builtins(spec)
    defaults = msgspec.to_builtins(Spec())
    changed = {key: value for key, value in fields.items() if value != defaults[key]}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": changed}


def reference_to(run: TrainRun) -> JsonObject:
    """Returns the reference by which a TrainRun owns objects."""
    meta = run.metadata
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": meta.name,
        "uid": meta.uid,
    }


def changed_fields(before: Status, after: Status) -> dict[str, Any]:
    """Builds a merge patch from one status to another; {} if they are equal. Fields that are gone
    are null."""
    old = msgspec.to_builtins(before)
    new = msgspec.to_builtins(after) | {"state": after.state}
    old |= {"state": before.state} if before.observed_generation else {}
    patch = {key: value for key, value in new.items() if old.get(key) != value}
    if "run" in patch:  # a merge of two documents would be neither
        patch["run"] = _replacing(old.get("run", {}), patch["run"])
    return patch | {key: None for key in old.keys() - new.keys()}


def _replacing(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = {
        key: _replacing(old.get(key), value) for key, value in new.items() if old.get(key) != value
    }
    return merged | {key: None for key in old.keys() - new.keys()}


def with_condition(
    conditions: Sequence[Condition],
    kind: str,
    holds: bool,
    reason: str,
    message: str,
    now: str,
) -> list[Condition]:
    """Returns the conditions with this one updated; its time is that of its last change between
    True and False."""
    status = "True" if holds else "False"
    updated = Condition(kind, status, reason, message, now)
    conditions_after = []
    for condition in conditions:
        if condition.type != kind:
            conditions_after.append(condition)
        elif condition.status == status:
            changed_at = condition.last_transition_time
            updated = structs.replace(updated, last_transition_time=changed_at)
    return sorted([*conditions_after, updated], key=lambda condition: condition.type)
