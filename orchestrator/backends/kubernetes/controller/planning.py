"""Plans of runs that are given in words: each made by a process of its own, which may take long and
may fail.

`python -m orchestrator.kubernetes.planner` does what `orch submit` does before it sends anything.
What it made is kept in a ConfigMap that the TrainRun owns, so that a controller that starts anew
need not plan everything again.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator import start
from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import KIND
from orchestrator.backends.kubernetes.train_run import (
    API_VERSION,
    Bundle,
    Planned,
    TrainRun,
    unpacked,
)
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_AT_ONCE = 2
_MOST_S = 900.0
_KEPT = 4096  # bundles in memory
_PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "PYTHONPATH",
    "KUBECONFIG",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
)


class Unplannable(Struct, frozen=True):
    """Why there is no plan, and the exit code of who would have submitted it."""

    text: str
    code: int


class Planner:
    """`changed(key)` is called when a plan has been made, or could not be."""

    def __init__(self, cluster: Cluster, changed: Callable[[str], None], home: str):
        self._cluster = cluster
        self._changed = changed
        self._home = home
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="planner")
        self._lock = threading.Lock()
        self._known: dict[
            str, tuple[str, Bundle | Unplannable]
        ] = {}  # uid -> digest of the inputs, what came of them
        self._good: dict[
            str, tuple[str, Bundle]
        ] = {}  # uid -> the last plan that could be made, and of what
        self._busy: set[str] = set()

    def bundle(self, run: TrainRun) -> Bundle | Unplannable | None:
        """What the run is rendered from; None: it is being planned, or read."""
        uid = run.metadata.uid
        inputs = run.inputs
        with self._lock:
            found = self._known.get(uid)
            if found is not None and found[0] == inputs:
                return found[1]
            if run.spec.planned is None:
                if uid not in self._busy:
                    self._busy.add(uid)
                    self._pool.submit(self._make, run, inputs)
                return None
        return self._keep(uid, inputs, _tried(lambda: unpacked(run.spec.planned)))  # type: ignore[arg-type]

    def last(self, run: TrainRun) -> Bundle | None:
        """The plan that is in force while another one is being made, or cannot be made. OrchError
        where it is stored and cannot be read."""
        with self._lock:
            if (found := self._good.get(run.metadata.uid)) is not None:
                return found[1]
        if (stored := self._stored(run, run.status.inputs)) is None:
            return None
        found_bundle = unpacked(stored)
        with self._lock:
            self._good[run.metadata.uid] = run.status.inputs, found_bundle
        return found_bundle

    def forget(self, uid: str) -> None:
        with self._lock:
            self._known.pop(uid, None)
            self._good.pop(uid, None)

    def _keep(self, uid: str, inputs: str, found: Bundle | Unplannable) -> Bundle | Unplannable:
        with self._lock:
            self._known[uid] = inputs, found
            if isinstance(found, Bundle):
                self._good[uid] = inputs, found
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return found

    def _make(self, run: TrainRun, inputs: str) -> None:
        uid = run.metadata.uid
        try:
            found = _tried(lambda: unpacked(self._stored(run, inputs) or self._plan(run, inputs)))
            if isinstance(found, Bundle) or found.code != Exit.CAPACITY:
                self._keep(uid, inputs, found)
            else:  # no answer from the cluster: asked again
                self._keep(uid, inputs, found)
                threading.Timer(30.0, self._again, (run,)).start()
        finally:
            with self._lock:
                self._busy.discard(uid)
        self._changed(run.key)

    def _again(self, run: TrainRun) -> None:
        with self._lock:
            self._known.pop(run.metadata.uid, None)
        self._changed(run.key)

    def _stored(self, run: TrainRun, inputs: str) -> Planned | None:
        body = self._cluster.within(run.metadata.namespace).get("ConfigMap", _name(run))
        if body is None or (body.get("data") or {}).get("inputs") != inputs:
            return None
        return msgspec.json.decode(body["data"]["planned"], type=Planned)

    def _plan(self, run: TrainRun, inputs: str) -> Planned:
        spec = run.spec
        asked: dict[str, Any] = {"run_id": run.metadata.name, "namespace": run.metadata.namespace}
        asked |= {"words": spec.words, "program": spec.program, "options": spec.options}
        environ = {name: os.environ[name] for name in _PASSED if name in os.environ} | {
            "ORCH_HOME": self._home
        }
        try:
            done = subprocess.run(
                start.command("orchestrator.kubernetes.planner"),
                input=msgspec.json.encode(asked), capture_output=True, timeout=_MOST_S, env=environ,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise OrchError(f"planning took more than {_MOST_S:g} s", Exit.CONFIG) from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
                "planning failed"
            ]
            codes = {int(code): code for code in Exit}
            text = said[0].removeprefix("orch: error: ")
            raise OrchError(text, codes.get(done.returncode, Exit.INTERNAL))
        found = msgspec.json.decode(done.stdout, type=Planned)
        self._store(run, inputs, found)
        return found

    def _store(self, run: TrainRun, inputs: str, found: Planned) -> None:
        about = run.metadata
        owner = {"apiVersion": API_VERSION, "kind": KIND, "name": about.name, "uid": about.uid}
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap"}
        body["metadata"] = {
            "name": _name(run),
            "namespace": about.namespace,
            "ownerReferences": [owner],
        }
        body["data"] = {"inputs": inputs, "planned": msgspec.json.encode(found).decode()}
        self._cluster.within(about.namespace).apply(body, "orch-controller", force=True)


def _name(run: TrainRun) -> str:
    return f"{run.metadata.name}-plan"


def _tried(make: Callable[[], Bundle]) -> Bundle | Unplannable:
    try:
        return make()
    except OrchError as error:
        return Unplannable(error.message, int(error.exit))
    except msgspec.MsgspecError as error:
        return Unplannable(f"what was planned cannot be read: {error}", int(Exit.CONFIG))
