"""Faults of runs on Kubernetes: of workers by a process in their pod (`pods/exec`), of pods by the API server.

The agent is process 1 of its pod, which no signal from inside can kill or stop. So a node of the run is lost by
deleting its pod, and told to leave by evicting it, as a drain does. The Job brings it back.
"""

from __future__ import annotations

import time

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.names import CONTAINER, RUNS
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest

from . import inside
from .node import nothing
from .trial import Done

_POD = ("kill_node", "notice")
_INSIDE = ("kill_worker", "stop_worker", "slow_worker", "disk_full", "bit_flip")
_STEP_S = 60.0  # for a process to start in a pod


class KubernetesTargets:
    """The pods of one run."""

    def __init__(self, folder: RunFolder, request: LaunchRequest, limit_s: float, backend: KubernetesBackend):
        """`limit_s`: after which a fault is taken back in any case."""
        self._folder, self._limit_s, self._backend = folder, limit_s, backend
        self._options = read_options(request.backend_options)

    def check(self, fault: str) -> None:
        """OrchError (64) for what this run cannot have."""
        if fault not in (*_POD, *_INSIDE):
            why = "it needs rights on the node" if fault == "partition" else "the agent is process 1 of its pod"
            can = ", ".join((*_POD, *_INSIDE))
            raise OrchError(f"{fault} cannot be done on Kubernetes, {why}; what can: {can}", Exit.USAGE)
        if fault in (*_POD, "bit_flip") and self._options.claim is None:
            text = (
                f"{fault}: without backend.options.claim no checkpoint outlives its pods, so nothing could be resumed"
            )
            raise OrchError(text, Exit.USAGE)

    def inject(self, fault: str, node: str, rank: int, for_s: float, pick: float) -> Done:
        """Do it."""
        self.check(fault)
        cluster, pods = self._backend.pods(self._folder)
        if node not in pods:
            raise OrchError(f"node {node} of run {self._folder.run_id} has no pod now", Exit.CAPACITY)
        at = time.time()
        if fault == "kill_node":
            cluster.delete("Pod", pods[node], grace_s=0)
        elif fault == "notice":
            cluster.evict(pods[node], grace_s=max(1, round(for_s)))
        else:
            return self._inside(cluster, pods[node], fault, rank, for_s, pick)
        return Done(at, nothing)

    def _inside(self, cluster: Cluster, pod: str, fault: str, rank: int, for_s: float, pick: float) -> Done:
        about = (1, fault, rank, for_s, pick, for_s + self._limit_s)
        argv = [self._options.python, "-P", *inside.words(f"{RUNS}/{self._folder.run_id}", *about)]
        command = cluster.command(pod, CONTAINER, argv)
        try:
            line = command.line(_STEP_S + for_s)
            if not line:
                raise command.failure()
            return Done(inside.heard(line), command.close)
        except BaseException:
            command.close()
            raise
