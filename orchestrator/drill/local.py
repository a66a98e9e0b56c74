"""Faults of runs of the local backend: exactly the processes of the run, found below its supervisor."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.backends.local import namespaces
from orchestrator.backends.local.backend import LocalRecord, read_options, read_record
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, load_plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, descendants, identity, is_alive
from orchestrator.run.request import LaunchRequest

from .node import Node, check_two_saves
from .trial import Done


class LocalTargets:
    """The processes of one run, as they are now."""

    def __init__(self, folder: RunFolder, request: LaunchRequest):
        self._folder, self._request = folder, request

    def check(self, fault: str) -> None:
        """OrchError (64, 76) for a fault that this run cannot have."""
        self._record()
        if fault == "partition" and read_options(self._request).network != "namespaces":
            raise OrchError("partition: the nodes share one network; submit with cluster=local_shaped", Exit.USAGE)
        if fault == "bit_flip":
            check_two_saves(self._folder)

    def inject(self, fault: str, node: str, rank: int, for_s: float, pick: float) -> Done:
        """Do it. A process that is gone already is no error: something was faster."""
        at = time.time()
        if fault == "partition":
            return Done(at, self._partition(node))
        return Done(at, Node(self._folder, self._agent(node)).inject(fault, rank, for_s, pick))

    def _record(self) -> LocalRecord:
        record = read_record(self._folder)
        if record is None or not is_alive(Identity(*record.supervisor)):
            raise OrchError(f"run {self._folder.run_id} has no supervisor here: it is not running", Exit.USAGE)
        return record

    def _agent(self, node: str) -> Identity:
        """The agent, if it really descends from the run's supervisor."""
        record = self._record()
        pid = record.agents.get(node)
        found = identity(pid) if pid is not None and node not in record.exit_codes else None
        if found is None or pid not in descendants(record.supervisor[0]):
            raise OrchError(f"node {node} of run {self._folder.run_id} has no agent here", Exit.CAPACITY)
        return found

    def _partition(self, node: str) -> Callable[[], None]:
        record = self._record()
        largest = max(self._request.sizes, default=0)
        plan = load_plan(self._folder.sized_plan(largest) if largest else self._folder.plan)
        index = plan.cluster.node_names.index(node)
        namespaces.cut([record.supervisor[0], *record.agents.values()], record.switches, index)

        def plug_in() -> None:
            now = self._record()
            namespaces.heal([now.supervisor[0], *now.agents.values()], now.switches, index)

        return plug_in
