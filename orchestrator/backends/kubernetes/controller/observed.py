"""The fields that the controller reads of the cluster's objects: few, so that each of ten thousand
pods takes a few hundred bytes."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator.backends.kubernetes.names import CONTAINER, GATE, GENERATION, INDEX, RUN
from orchestrator.backends.kubernetes.phases import seconds_of
from orchestrator.backends.kubernetes.pod_requests import PodShape, pod_requests
from orchestrator.backends.kubernetes.train_run import Meta


class Reason(Struct, frozen=True, omit_defaults=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Waiting(Struct, frozen=True, omit_defaults=True):
    reason: str = ""
    message: str = ""


class Terminated(Struct, frozen=True, omit_defaults=True, rename="camel"):
    exit_code: int = 0
    message: str = ""


class ContainerState(Struct, frozen=True, omit_defaults=True):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(Struct, frozen=True, omit_defaults=True):
    name: str = ""
    state: ContainerState = ContainerState()


class Gate(Struct, frozen=True):
    name: str = ""


class PodMeta(Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str
    namespace: str
    uid: str
    resource_version: str
    labels: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None


class PodSpec(PodShape, frozen=True, rename="camel", omit_defaults=True):
    node_name: str = ""
    scheduling_gates: list[Gate] = []


class PodStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    phase: str = ""
    conditions: list[Reason] = []
    container_statuses: list[ContainerStatus] | None = None


class Pod(Struct, frozen=True, omit_defaults=True, dict=True):
    metadata: PodMeta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def run(self) -> str:
        """namespace/run id; "" for a pod of no run."""
        name = self.metadata.labels.get(RUN, "")
        return f"{self.metadata.namespace}/{name}" if name else ""

    @property
    def index(self) -> int:
        label = self.metadata.labels.get(INDEX, "")
        return int(label) if label.isdigit() else -1

    @property
    def generation(self) -> int:
        label = self.metadata.labels.get(GENERATION, "")
        return int(label) if label.isdigit() else -1

    @property
    def created_at(self) -> float:
        """Creation time in Unix seconds."""
        return seconds_of(self.metadata.creation_timestamp) or 0.0

    @property
    def leaves(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def exit_code(self) -> int | None:
        for container in self.status.container_statuses or ():
            if container.name == CONTAINER and container.state.terminated:
                return container.state.terminated.exit_code
        return None

    @property
    def gated(self) -> bool:
        return any(gate.name == GATE for gate in self.spec.scheduling_gates)

    @property
    def ended(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def running(self) -> bool:
        return self.status.phase == "Running" and self.metadata.deletion_timestamp is None

    @cached_property
    def needs(self) -> dict[str, float]:
        """Resources that it requests of its node."""
        return pod_requests(self.spec)

    def body(self) -> dict[str, Any]:
        """Returns the fields that were read, spelled as the API server spells them."""
        body: dict[str, Any] = msgspec.to_builtins(self)
        body.setdefault("spec", {})
        body.setdefault("status", {})
        return body


class JobSpec(Struct, frozen=True, omit_defaults=True, rename="camel"):
    completions: int = 0
    suspend: bool = False
    success_policy: dict[str, Any] = {}  # set for an elastic run


class JobStatus(Struct, frozen=True, omit_defaults=True):
    conditions: list[Reason] = []
    failed: int = 0
    succeeded: int = 0
    active: int = 0


class Job(Struct, frozen=True, omit_defaults=True):
    metadata: Meta
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()

    @property
    def run(self) -> str:
        name = self.metadata.labels.get(RUN, "")
        return f"{self.metadata.namespace}/{name}" if name else ""

    @property
    def generation(self) -> int:
        label = self.metadata.labels.get(GENERATION, "")
        return int(label) if label.isdigit() else -1

    @property
    def leaves(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def finished(self) -> bool:
        return any(
            condition.type in ("Complete", "Failed") and condition.status == "True"
            for condition in self.status.conditions
        )

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.to_builtins(self)
        body.setdefault("spec", {})
        body.setdefault("status", {})
        return body
