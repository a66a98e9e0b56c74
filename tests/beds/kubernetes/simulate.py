"""`python -m tests.beds.kubernetes.simulate make COUNT | serve`, inside a bed: nodes by the
thousand, without machines.

Nodes are objects; scheduler, quota and queues take them as any others. `serve` plays all their
kubelets: pods bound to them run as soon as real ones would, end well some seconds later when their
annotation says so, and go when they are deleted.
"""

from __future__ import annotations

import contextlib
import http.client
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.errors import OrchError

from .bound import Pod, watched

NODES_PER_LEAF = 4
LEAVES_PER_SPINE = 16
LEVELS = {
    "leaf": "orch.test/leaf",
    "spine": "orch.test/spine",
}  # level of a plan -> label of the nodes
POOL = 24  # of the last nodes are a pool of their own: room for three runs of eight
FINISHES = "orch.test/finishes"  # annotation of pods that end well
LIFE_S = 4.0
# from a pod's binding until it is said to run: 1.1 to 1.9 s on the real nodes, their image at hand
START_S = 1.5


def node(index: int, count: int) -> dict[str, Any]:
    leaf = index // NODES_PER_LEAF
    name = f"sim-{index}"
    amounts = {
        "cpu": "128",
        "memory": "2Ti",
        "ephemeral-storage": "4Ti",
        "pods": "110",
        "nvidia.com/gpu": "8",
    }
    pool = "small" if index >= count - POOL else "large"
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "orch.test/kind": "simulated",
        "orch.test/pool": pool,
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        LEVELS["leaf"]: f"leaf-{leaf}",
        LEVELS["spine"]: f"spine-{leaf // LEAVES_PER_SPINE}",
    }
    ready = {"type": "Ready", "status": "True", "reason": "Simulated"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": status,
    }


def make(cluster: Cluster, count: int) -> None:
    cluster.version()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: _create(cluster, node(index, count)), range(count)))


def _create(cluster: Cluster, body: dict[str, Any]) -> None:
    for pause in (1.0, 5.0, 20.0, 60.0):  # on a busy machine the API server stands still at times
        with contextlib.suppress(OrchError):
            cluster.create(body)
            return
        time.sleep(pause)
    cluster.create(body)


# ------------------------------------------------------------------------------------------
#     kubelets


def serve() -> None:
    """Whatever happens to pods is looked at; every half minute all of them are, for what has
    failed."""
    kubelets = Kubelets()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            for pod in watched("/api/v1/pods", {"fieldSelector": "spec.nodeName!="}, seconds=30):
                if pod.spec.node.startswith("sim-"):
                    kubelets.hear(pod)
        time.sleep(0.2)


class Kubelets:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8)
        self._clusters = {}
        self._ending = set()
        self._starting: queue.SimpleQueue[tuple[float, Pod]] = (
            queue.SimpleQueue()
        )  # in the order that they are due
        threading.Thread(target=self._start, daemon=True).start()

    def hear(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        phase = pod.status.phase
        if pod.metadata.leaving:
            self._pool.submit(self._attend, self._delete, pod)
        elif phase == "Pending":
            self._starting.put((time.monotonic() + START_S, pod))
        elif (
            phase == "Running" and FINISHES in pod.metadata.annotations and uid not in self._ending
        ):
            self._ending.add(uid)
            threading.Timer(LIFE_S, self._pool.submit, (self._attend, self._finish, pod)).start()

    def _start(self) -> None:
        while True:
            due, pod = self._starting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._pool.submit(self._attend, self._run, pod)

    def _attend(self, deed: Callable[[Cluster, str, Pod], None], pod: Pod) -> None:
        space = pod.metadata.namespace
        name = pod.metadata.name
        api = self._clusters.setdefault(space, Cluster(None, space))
        for pause in (0.5, 2.0, 0.0):
            try:
                return deed(api, name, pod)
            except OrchError as error:
                if getattr(error, "status", None) in (
                    404,
                    409,
                    422,
                ):  # deleted, changed or ended in between
                    return None
                time.sleep(pause)

    def _run(self, api: Cluster, name: str, pod: Pod) -> None:
        api.patch_status("Pod", name, _status(pod, "Running", {"running": {"startedAt": _now()}}))

    def _finish(self, api: Cluster, name: str, pod: Pod) -> None:
        api.patch_status("Pod", name, _status(pod, "Succeeded", {"terminated": {"exitCode": 0}}))

    def _delete(self, api: Cluster, name: str, pod: Pod) -> None:
        if pod.status.phase in ("Pending", "Running"):
            api.patch_status("Pod", name, _status(pod, "Failed", {"terminated": {"exitCode": 143}}))
        api.delete("Pod", name, grace_s=0)


def _status(pod: Pod, phase: str, state: dict[str, Any]) -> dict[str, Any]:
    ready = phase == "Running"
    container = {
        "restartCount": 0,
        "image": "none",
        "imageID": "",
        "ready": ready,
        "started": ready,
        "state": state,
    }
    return {
        "phase": phase,
        "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": _now()}],
        "containerStatuses": [{**container, "name": c.name} for c in pod.spec.containers],
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


if __name__ == "__main__":
    make(Cluster(), int(sys.argv[2])) if sys.argv[1] == "make" else serve()
