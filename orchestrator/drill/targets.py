"""Injects faults into a run: into its processes on this machine, or on the nodes of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from orchestrator.backends.base import Backend, NodeExec, NodeRemoval, read_record
from orchestrator.backends.local import namespaces
from orchestrator.backends.local.backend import LocalBackend, LocalRecord, read_options
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, descendants, identity, is_alive
from orchestrator.run.request import LaunchRequest

from . import node_command
from .faults import KINDS
from .node_faults import NodeProcesses, check_two_saves, no_undo

_START_S = 120.0  # for a process to start on a node of a cluster; a busy controller takes its time


class InjectedFault(NamedTuple):
    """A fault that has been injected, and how to undo it."""

    at: float  # Unix seconds just before the injection, by the clock of its machine
    undo: Callable[[], None]  # may be called several times


class Targets(Protocol):
    """The processes and nodes of one run."""

    def check(self, fault: str) -> None:
        """Raises OrchError (64, 76) for a fault that this run cannot have."""

    def inject(
        self,
        fault: str,
        node: str,
        rank: int,
        for_s: float,
        pick: float,
    ) -> InjectedFault:
        """Injects the fault into that node, or that rank on it. `pick` (0 to 1) draws if there is
        something to choose.

        OrchError (76) if the target is gone by now.
        """


def targets_of(
    backend: Backend,
    folder: RunFolder,
    request: LaunchRequest,
    limit_s: float,
) -> Targets:
    """Returns the targets of a run. `limit_s`: the time after which a fault is undone in any
    case. OrchError (64) for a backend that cannot reach its nodes."""
    if isinstance(backend, NodeExec):
        return ClusterTargets(backend, folder, request, limit_s)
    if isinstance(backend, LocalBackend):
        return LocalTargets(folder, request)
    raise OrchError(f"runs of the backend {backend.name} cannot be drilled", Exit.USAGE)


class LocalTargets:
    """The processes of one run on this machine, as they are now."""

    def __init__(self, folder: RunFolder, request: LaunchRequest):
        self._folder = folder
        self._request = request

    def check(self, fault: str) -> None:
        """Raises OrchError (64, 76) for a fault that this run cannot have."""
        self._record()
        if fault == "partition" and read_options(self._request).network != "namespaces":
            raise OrchError(
                "partition: the nodes share one network; submit with cluster=local_shaped",
                Exit.USAGE,
            )
        if fault == "bit_flip":
            check_two_saves(self._folder)

    def inject(
        self,
        fault: str,
        node: str,
        rank: int,
        for_s: float,
        pick: float,
    ) -> InjectedFault:
        """Injects the fault. A process that has already ended is not an error."""
        at = time.time()
        if fault == "partition":
            return InjectedFault(at, self._partition(node))
        return InjectedFault(
            at,
            NodeProcesses(self._folder, self._agent(node)).inject(fault, rank, for_s, pick),
        )

    def _record(self) -> LocalRecord:
        record = read_record(self._folder, LocalRecord)
        if record is None or not is_alive(Identity(*record.supervisor)):
            raise OrchError(
                f"run {self._folder.run_id} has no supervisor here: it is not running", Exit.USAGE
            )
        return record

    def _agent(self, node: str) -> Identity:
        """Returns the agent, if it really descends from the run's supervisor."""
        record = self._record()
        pid = record.agents.get(node)
        agent = identity(pid) if pid is not None and node not in record.exit_codes else None
        if agent is None or pid not in descendants(record.supervisor[0]):
            raise OrchError(
                f"node {node} of run {self._folder.run_id} has no agent here", Exit.CAPACITY
            )
        return agent

    def _partition(self, node: str) -> Callable[[], None]:
        record = self._record()
        switches = record.switches
        largest = max(self._request.sizes, default=0)
        plan = load_plan(self._folder.sized_plan(largest) if largest else self._folder.plan)
        index = plan.cluster.node_names.index(node)
        assert switches is not None  # `check` has found network=namespaces
        namespaces.cut(
            [record.supervisor[0], *record.agents.values()],
            switches,
            index,
        )

        def heal() -> None:
            now = self._record()
            namespaces.heal(
                [now.supervisor[0], *now.agents.values()],
                now.switches or switches,
                index,
            )

        return heal


class ClusterTargets:
    """The nodes of one run on a cluster: a fault is a command next to the agent, or the removal
    of a node."""

    def __init__(
        self,
        backend: NodeExec,
        folder: RunFolder,
        request: LaunchRequest,
        limit_s: float,
    ):
        self._backend = backend
        self._folder = folder
        self._request = request
        self._limit_s = limit_s

    def check(self, fault: str) -> None:
        """OrchError (64) for a fault that this run cannot have."""
        if reason := self._why_not(fault):
            possible = ", ".join(name for name in KINDS if not self._why_not(name))
            raise OrchError(
                f"{fault} cannot be injected: {reason}; what can be: {possible}", Exit.USAGE
            )
        removal = self._backend if isinstance(self._backend, NodeRemoval) else None
        if (
            removal
            and fault in ("kill_node", "notice", "bit_flip")
            and (reason := removal.why_not_removed(self._request))
        ):
            raise OrchError(f"{fault}: {reason}", Exit.USAGE)

    def _why_not(self, fault: str) -> str:
        removes = isinstance(self._backend, NodeRemoval) and fault in ("kill_node", "notice")
        if fault == "partition":
            return "it needs rights on the node"
        if self._backend.agent_is_init and KINDS[fault].takes == "node" and not removes:
            return "the agent is process 1 of its pod"
        return ""

    def inject(
        self,
        fault: str,
        node: str,
        rank: int,
        for_s: float,
        pick: float,
    ) -> InjectedFault:
        """Injects the fault. The command runs as long as there is something to undo."""
        self.check(fault)
        if isinstance(self._backend, NodeRemoval) and fault in ("kill_node", "notice"):
            at = time.time()
            grace_s = max(1, round(for_s)) if fault == "notice" else None
            self._backend.remove_node(self._folder, node, grace_s)
            return InjectedFault(at, no_undo)
        limit_s = for_s + self._limit_s
        command = self._backend.exec_on_node(
            self._folder,
            self._request,
            node,
            lambda run_dir, agent: node_command.arguments(
                run_dir,
                agent,
                fault,
                rank=rank,
                for_s=for_s,
                pick=pick,
                limit_s=limit_s,
            ),
        )
        try:
            line = command.line(_START_S + for_s)
            if not line:
                raise command.failure()
            return InjectedFault(node_command.injected_at(line), command.close)
        except BaseException:
            command.close()
            raise
