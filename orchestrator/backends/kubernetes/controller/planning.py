"""Plans runs that are given in words, each in a process of its own, which may take long and may
fail.

`python -m orchestrator.cli.plan_train_run` does what `orch submit` does before it sends anything.
Its result is kept in a ConfigMap that the TrainRun owns, so that a restarted controller need not
plan everything again.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from orchestrator import start
from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.names import KIND, JsonObject
from orchestrator.backends.kubernetes.train_run import (
    API_VERSION,
    Bundle,
    Planned,
    TrainRun,
    unpacked,
)
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_PROCESSES = 2
_LONGEST_S = 900.0
_MOST_BUNDLES = 4096  # in memory
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
    """Why there is no plan, and the exit code that `orch submit` would have had."""

    reason: str
    code: int


class Planner:
    """Plans in the background. `changed(key)` is called when a plan was made, or could not be."""

    def __init__(self, cluster: Cluster, changed: Callable[[str], None], home: str):
        self._cluster = cluster
        self._changed = changed
        self._home = home
        self._pool = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="planner")
        self._lock = threading.Lock()
        # uid -> (digest of the inputs, their plans or why there is none)
        self._known: dict[str, tuple[str, Bundle | Unplannable]] = {}
        # uid -> the last plans that could be made, with the digest of their inputs
        self._good: dict[str, tuple[str, Bundle]] = {}
        self._busy: set[str] = set()

    def bundle(self, run: TrainRun) -> Bundle | Unplannable | None:
        """Returns what the run is rendered from, or None while it is being planned or read."""
        uid = run.metadata.uid
        inputs = run.inputs
        with self._lock:
            outcome = self._known.get(uid)
            if outcome is not None and outcome[0] == inputs:
                return outcome[1]
            if run.spec.planned is None:
                if uid not in self._busy:
                    self._busy.add(uid)
                    self._pool.submit(self._make, run, inputs)
                return None
        packed = run.spec.planned
        return self._keep(uid, inputs, _tried(lambda: unpacked(packed)))

    def last(self, run: TrainRun) -> Bundle | None:
        """Returns the plans in force while others are being made, or cannot be made. OrchError if
        they are stored and cannot be read."""
        with self._lock:
            if (bundle_in_force := self._good.get(run.metadata.uid)) is not None:
                return bundle_in_force[1]
        if (stored := self._stored(run, run.status.inputs)) is None:
            return None
        bundle = unpacked(stored)
        with self._lock:
            self._good[run.metadata.uid] = run.status.inputs, bundle
        return bundle

    def forget(self, uid: str) -> None:
        with self._lock:
            self._known.pop(uid, None)
            self._good.pop(uid, None)

    def _keep(
        self,
        uid: str,
        inputs: str,
        outcome: Bundle | Unplannable,
    ) -> Bundle | Unplannable:
        with self._lock:
            self._known[uid] = inputs, outcome
            if isinstance(outcome, Bundle):
                self._good[uid] = inputs, outcome
            while len(self._known) > _MOST_BUNDLES:
                del self._known[next(iter(self._known))]
        return outcome

    def _make(self, run: TrainRun, inputs: str) -> None:
        uid = run.metadata.uid
        try:
            outcome = _tried(lambda: unpacked(self._stored(run, inputs) or self._plan(run, inputs)))
            self._keep(uid, inputs, outcome)
            if isinstance(outcome, Unplannable) and outcome.code == Exit.CAPACITY:
                # the cluster did not answer
                threading.Timer(30.0, self._retry, (run,)).start()
        finally:
            with self._lock:
                self._busy.discard(uid)
        self._changed(run.key)

    def _retry(self, run: TrainRun) -> None:
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
        planner_input: JsonObject = {
            "run_id": run.metadata.name,
            "namespace": run.metadata.namespace,
            "words": spec.words,
            "program": spec.program,
            "options": spec.options,
        }
        environ = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environ["ORCH_HOME"] = self._home
        try:
            process = subprocess.run(
                start.command("orchestrator.cli.plan_train_run"),
                input=msgspec.json.encode(planner_input),
                capture_output=True,
                timeout=_LONGEST_S,
                env=environ,
            )
        except subprocess.TimeoutExpired:
            raise OrchError(f"planning took more than {_LONGEST_S:g} s", Exit.CONFIG) from None
        if process.returncode:
            lines = process.stderr.decode(errors="replace").strip().splitlines()
            message = lines[-1] if lines else "planning failed"
            codes = {int(code): code for code in Exit}
            exit = codes.get(process.returncode, Exit.INTERNAL)
            raise OrchError(message.removeprefix("orch: error: "), exit)
        planned = msgspec.json.decode(process.stdout, type=Planned)
        self._store(run, inputs, planned)
        return planned

    def _store(self, run: TrainRun, inputs: str, planned: Planned) -> None:
        meta = run.metadata
        owner = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": meta.name,
            "uid": meta.uid,
        }
        config_map: JsonObject = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": _name(run),
                "namespace": meta.namespace,
                "ownerReferences": [owner],
            },
            "data": {"inputs": inputs, "planned": msgspec.json.encode(planned).decode()},
        }
        self._cluster.within(meta.namespace).apply(
            config_map,
            "orch-controller",
            force=True,
        )


def _name(run: TrainRun) -> str:
    return f"{run.metadata.name}-plan"


def _tried(make: Callable[[], Bundle]) -> Bundle | Unplannable:
    try:
        return make()
    except OrchError as error:
        return Unplannable(error.message, int(error.exit))
    except msgspec.MsgspecError as error:
        return Unplannable(f"what was planned cannot be read: {error}", int(Exit.CONFIG))
