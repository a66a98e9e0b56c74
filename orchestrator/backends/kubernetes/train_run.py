"""The `TrainRun` resource: what somebody wants to have trained, and what its controller says of it.
Pure.

Spec and status as values; their schema for the API server is in
`charts/orch-controller/files/trainruns.yaml`, and a test holds the two together. What was planned
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

from .names import GROUP, KIND, VERSION
from .objects.payload import pack_plan, unpack_plan

API_VERSION = f"{GROUP}/{VERSION}"
MOST_BYTES = 1_000_000  # of what was planned, in one object (etcd takes 1.5 MiB)


class Meta(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The part of an object's metadata that is acted on."""

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
    """A submission that was planned where it was made: request and configuration as texts, plans
    packed, base64."""

    request: str
    config: str
    plans: list[str]  # of every size, largest first; of a run with one size that one


class Spec(Struct, frozen=True, rename="camel"):
    words: list[str] = []  # of `orch submit`: cluster=..., parallel=...
    program: list[str] = []  # what follows `--`
    options: dict[str, Any] = {}  # backend.options
    planned: Planned | None = None  # in place of words
    environment: dict[str, str] = {}  # variables for the run's processes
    environment_secret: str = ""  # of the run's namespace: the same, of what nobody should read
    draft: bool = False  # its submission is not complete: one that stays so is deleted
    nodes: int | None = None  # one of the run's sizes, instead of the largest that finds room
    priority: int = 0  # of those that wait, the higher are placed first
    attempt: int = 0  # one more starts a run that has ended once more
    stopped: bool = False  # it is to end, after saving
    force: bool = False  # ... without


class Condition(Struct, frozen=True, rename="camel"):
    type: str
    status: str  # True, False
    reason: str
    message: str = ""
    last_transition_time: str = ""


class Status(Struct, frozen=True, rename="camel", omit_defaults=True):
    observed_generation: int = 0
    attempt: int = 0  # of the spec, that this is about
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
    generation: int = -1  # of the Job: one more with each start
    ended_generation: int = -1  # the last one whose end is told here
    restarts: int = 0  # of all workers, over all starts
    lost_pods: int = 0  # pods that came back, over all starts
    started_at: str = ""
    ended_at: str = ""
    last_step_at: str = ""
    wait_until: str = ""  # not placed again before: what it has asked for failed a moment ago
    fails: int = 0  # in a row, of starts that came to nothing; how long it waits follows from it
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
        """A digest of what the plan is made from: another one is another plan of the same run."""
        spec = self.spec
        what = msgspec.json.encode(
            (spec.words, spec.program, spec.options, spec.planned), order="deterministic"
        )
        return hashlib.sha256(what).hexdigest()[:16]

    @property
    def is_over(self) -> bool:
        """It has ended, and nobody has asked for more since."""
        status = self.status
        if not status.over or status.attempt != self.spec.attempt:
            return False
        return status.inputs in ("", self.inputs) and (
            status.state != "cancelled" or self.spec.stopped
        )


class Bundle(Struct, frozen=True):
    """What a run is rendered from."""

    request: LaunchRequest
    config: bytes
    plans: dict[int, Plan]  # by nodes that hold ranks

    @property
    def largest(self) -> Plan:
        return self.plans[max(self.plans)]


def planned(bundle: SubmissionBundle, plans: Sequence[Plan]) -> Planned:
    """OrchError (65) when it is too large for one object."""
    found = Planned(
        request=to_bytes(bundle.request).decode(),
        config=bundle.contents["config.yaml"].decode(),
        plans=[base64.b64encode(pack_plan(plan)).decode() for plan in plans],
    )
    size = len(msgspec.json.encode(found))
    if size > MOST_BYTES:
        text = (
            f"the run's plans would make an object of {size} bytes, Kubernetes takes {MOST_BYTES}:"
            " ask for fewer sizes"
        )
        raise OrchError(text, Exit.CONFIG)
    return found


def unpacked(found: Planned) -> Bundle:
    """OrchError (65) for what was not planned by us, or by another version."""
    from orchestrator.planner.placement.rank_assignment import used_node_count

    try:
        plans = [unpack_plan(base64.b64decode(text, validate=True)) for text in found.plans]
        request = from_bytes(found.request.encode())
    except (PlanError, ValueError) as error:
        raise OrchError(f"spec.planned: {error}", Exit.CONFIG) from None
    if not plans:
        raise OrchError("spec.planned.plans is empty", Exit.CONFIG)
    return Bundle(request, found.config.encode(), {used_node_count(plan): plan for plan in plans})


def body_of(
    name: str, namespace: str, spec: Spec, annotations: dict[str, str], labels: dict[str, str]
) -> dict[str, Any]:
    """The object as it is sent: of the spec what differs from the default."""
    about: dict[str, Any] = {"name": name, "namespace": namespace, "labels": labels}
    if annotations:
        about["annotations"] = annotations
    whole = msgspec.to_builtins(spec)
    usual = msgspec.to_builtins(Spec())
    kept = {key: value for key, value in whole.items() if value != usual[key]}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": about, "spec": kept}


def changed_fields(before: Status, after: Status) -> dict[str, Any]:
    """A merge patch from one status to another; {} for none. Fields that are gone are null."""
    old = msgspec.to_builtins(before)
    new = msgspec.to_builtins(after) | {"state": after.state}
    old |= {"state": before.state} if before.observed_generation else {}
    found = {key: value for key, value in new.items() if old.get(key) != value}
    if "run" in found:  # a merge of two documents would be neither
        found["run"] = _replacing(old.get("run", {}), found["run"])
    return found | {key: None for key in old.keys() - new.keys()}


def _replacing(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    merged = {
        key: _replacing(old.get(key), value) for key, value in new.items() if old.get(key) != value
    }
    return merged | {key: None for key in old.keys() - new.keys()}


def with_condition(
    conditions: Sequence[Condition], kind: str, holds: bool, reason: str, message: str, now: str
) -> list[Condition]:
    """The conditions with this one as it is now; its time is that of the last change between True
    and False."""
    status = "True" if holds else "False"
    found = Condition(kind, status, reason, message, now)
    kept = []
    for one in conditions:
        if one.type != kind:
            kept.append(one)
        elif one.status == status:
            found = structs.replace(found, last_transition_time=one.last_transition_time)
    return sorted([*kept, found], key=lambda one: one.type)
