"""The controller in a bed: processes of this machine, so that they can be killed, paused and
started at any moment."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.beds.base import ROOT, BedError, wait
from tests.patience import PATIENCE_S

from .bed import Bed

SPACE = "orch-system"
_PORTS = itertools.count(19404)


def install(bed: Bed) -> None:
    """The kind TrainRun, and the controller's namespace."""
    bed.kubectl(
        "apply", "--server-side", "-f", str(ROOT / "charts/orch-controller/files/trainruns.yaml")
    )
    bed.kubectl("create", "namespace", SPACE, check=False)
    query = ("get", "--raw", "/apis/orch.dev/v1alpha1")
    bed.wait(
        lambda: "trainruns" in bed.kubectl(*query, check=False), 60, "TrainRuns", "kube-apiserver"
    )


class Replica:
    """One process of the controller."""

    def __init__(self, bed: Bed, name: str, lease_s: float = 6.0):
        self.bed = bed
        self.name = name
        self.port = next(_PORTS)
        argv = [
            sys.executable,
            "-m",
            "orchestrator.backends.kubernetes.controller",
            "--namespace",
            SPACE,
            "--identity",
            name,
        ]
        argv += ["--metrics-port", str(self.port), "--home", str(bed.home / f"controller-{name}")]
        self._process = bed.popen(
            name, *argv, f"--lease-s={lease_s}", env={"PYTHONPATH": str(ROOT)}
        )
        self.pid = 0

    @property
    def log(self) -> str:
        return (self.bed.home / "log" / f"{self.name}.log").read_text(errors="replace")

    def find(self) -> int:
        """Its pid: nsenter, which is what was started, has forked it."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError):
            if child_pids := children.read_text().split():
                self.pid = int(child_pids[0])
        return self.pid

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.find() or self._process.pid, number)
            if number == signal.SIGCONT:  # nsenter stops with what it waits for
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self._process.wait(30)

    def end(self) -> int:
        """Ends it as Kubernetes does, and returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BedError(f"{self.name} does not end\n{self.log[-2000:]}") from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def leads(self) -> bool:
        return f"{self.name} leads" in self.log


@contextlib.contextmanager
def controller(bed: Bed, name: str, lease_s: float = 20.0) -> Iterator[Replica]:
    """One that leads until the body ends. It gives its lease back, so that the next one leads at
    once."""
    replica = Replica(bed, name, lease_s)
    try:
        if not wait(lambda: replica.leads or not replica.alive, PATIENCE_S):
            raise BedError(f"{name} does not lead\n{replica.log[-2000:]}")
        yield replica
    finally:
        if replica.alive:
            replica.end()


def runs(bed: Bed, namespace: str = "") -> dict[str, dict]:
    """Every TrainRun by `namespace/name`."""
    where = ("-n", namespace) if namespace else ("-A",)
    return {
        f"{train_run['metadata']['namespace']}/{train_run['metadata']['name']}": train_run
        for train_run in bed.get("trainruns", *where)["items"]
    }


def ledger(bed: Bed) -> dict[str, dict]:
    """Its allocations."""
    import zlib
    from base64 import b64decode

    body = bed.get("configmap", "-n", SPACE, "orch-placements")
    return json.loads(zlib.decompress(b64decode(body["binaryData"]["book"]))).get("allocations", {})
