"""The controller's process: waits to lead, then watches, reconciles and decides until it is told to
stop."""

from __future__ import annotations

import argparse
import heapq
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.options import KubernetesOptions
from orchestrator.backends.kubernetes.pod.status_lines import StatusLine
from orchestrator.backends.kubernetes.train_run import Planned
from orchestrator.cluster.model import Topology
from orchestrator.errors import OrchError
from orchestrator.observe.timeline import StepLine
from orchestrator.plan import Plan
from orchestrator.plan.codec import decoder
from orchestrator.plan.exits import Exit
from orchestrator.run.request import LaunchRequest
from orchestrator.run.state import RunState

from .decisions import Decisions
from .election import Election
from .ledger import Book, Fenced, Ledger
from .planning import Planner
from .rebuild import rebuilt
from .reconcile import Reconciler
from .reports import Reports
from .series import Series
from .store import Store

#: Types that threads decode in addition to the watched ones; see decoder.
DECODED = (
    Planned,
    Plan,
    LaunchRequest,
    KubernetesOptions,
    Topology,
    RunState,
    StatusLine,
    StepLine,
    Book,
)
_WORKERS = 8
_COALESCE_S = 0.02  # changes within this time are handled together
_DECIDE_S = 0.1  # shortest time between two decisions
_CLAIMS_S = 5.0  # between two decisions while a run waits for GPUs that others hold by claims
_RETRY_S = (0.5, 2.0, 10.0, 30.0)

log = logging.getLogger("orch.controller")


class Controller:
    """The leading controller. `run` returns the exit code of the process."""

    def __init__(
        self,
        cluster: Cluster,
        election: Election,
        everywhere: bool,
        home: str,
        series: Series,
    ):
        self._election = election
        self._series = series
        self._wake = threading.Condition()
        self._due: list[tuple[float, str]] = []  # a heap of (time, run to look at)
        self._timers: dict[str, float] = {}  # run -> the entry of the heap that counts
        self._dirty: dict[str, float] = {}  # run -> since when
        self._busy: set[str] = set()
        self._tries: dict[str, int] = {}
        self._room_changed = False
        self._over = ""
        self._store = Store(cluster, self.dirty, self._room, everywhere)
        self._ledger = Ledger(cluster)
        self._decisions = Decisions(self._ledger, self._store, self.dirty)
        self._planner = Planner(cluster, self.dirty, home)
        self._reports = Reports(cluster, self.dirty)
        self._reconciler = Reconciler(
            cluster,
            store=self._store,
            ledger=self._ledger,
            decisions=self._decisions,
            planner=self._planner,
            reports=self._reports,
            again=self._look_later,
            leads=lambda: election.leads and not self._over,
        )
        self._cluster = cluster
        self._everywhere = everywhere

    # ---------------------------------------------------------------------------------- any thread

    def dirty(self, key: str) -> None:
        """Marks the run to be reconciled as soon as no thread reconciles it."""
        with self._wake:
            self._dirty.setdefault(key, time.monotonic())
            self._wake.notify()

    def _look_later(self, key: str, seconds: float) -> None:
        at = time.monotonic() + seconds
        with self._wake:
            if self._timers.get(key, at) < at:
                return
            self._timers[key] = at
            heapq.heappush(self._due, (at, key))
            self._wake.notify()

    def _room(self, node: str) -> None:
        with self._wake:
            self._room_changed = True
            self._wake.notify()
        if node:
            for key, allocation in list(self._ledger.book.allocations.items()):
                if node in allocation.nodes or not all(allocation.nodes):
                    self.dirty(key)

    def end(self, reason: str) -> None:
        with self._wake:
            self._over = self._over or reason
            self._wake.notify()

    # ------------------------------------------------------------------------------ the main thread

    def run(self) -> int:
        self._election.keep(lambda: self.end("the lease is lost"))
        self._store.start()
        if not self._ledger.load() or not self._ledger.book.allocations:
            self._ledger.write(rebuilt(self._cluster, self._store, self._everywhere))
        self._series.publish(self._store.runs.all, self._ledger)
        self._reports.start()
        for run in self._store.runs.all():
            self.dirty(run.key)
        for key in self._ledger.book.allocations:
            self.dirty(key)
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="reconcile")
        try:
            self._loop(pool)
        except Fenced as error:
            self.end(str(error))
        finally:
            self._store.stop()
            self._reports.stop()
            pool.shutdown(wait=False, cancel_futures=True)
        log.info("ends: %s", self._over)
        return int(Exit.DONE if self._over == _ENDED_BY_SIGNAL else Exit.FENCED)

    def _loop(self, pool: ThreadPoolExecutor) -> None:
        decided_at = 0.0
        decision_due = False
        while True:
            with self._wake:
                if not decision_due and self._is_idle():
                    until_timer = (max(0.0, at - time.monotonic()) for at, _ in self._due[:1])
                    self._wake.wait(min([1.0, *until_timer]))
                if self._over:
                    return
                now = time.monotonic()
                since = self._take_due(now)
                decision_due = decision_due or self._room_changed
                self._room_changed = False
                resting = not since and bool(self._dirty)
            for key, dirty_since in since.items():
                pool.submit(self._look, key, dirty_since)
            if now > decided_at + _CLAIMS_S and self._decisions.waits_for_claims:
                decision_due = True
            if (decision_due and self._decisions.anything) or self._decisions.news:
                if now < decided_at + _DECIDE_S:
                    time.sleep(_COALESCE_S)
                    continue
                decision_due = False
                decided_at = now
                self._decide()
            else:
                decision_due = False
                if resting:
                    time.sleep(_COALESCE_S)

    def _is_idle(self) -> bool:
        """Tells whether nothing is to be reconciled or decided now. The caller holds the lock."""
        if any(key not in self._busy for key in self._dirty):
            return False
        return not (self._room_changed or self._decisions.news or self._over)

    def _take_due(self, now: float) -> dict[str, float]:
        """Takes the runs to reconcile now: run -> since when it is dirty. The caller holds the
        lock."""
        while self._due and self._due[0][0] <= now:
            at, key = heapq.heappop(self._due)
            if self._timers.get(key) == at:
                del self._timers[key]
                self._dirty.setdefault(key, now)
        chosen = [
            key
            for key, at in self._dirty.items()
            if key not in self._busy and at <= now - _COALESCE_S
        ]
        self._busy.update(chosen)
        return {key: self._dirty.pop(key) for key in chosen}

    def _decide(self) -> None:
        started = time.monotonic()
        try:
            self._decisions.decide(time.time())
        except OrchError as error:  # the runs ask again
            log.warning("nothing decided: %s", error.message)
            time.sleep(1.0)
            with self._wake:
                self._room_changed = True
        self._series.decided(time.monotonic() - started)

    def _look(self, key: str, since: float) -> None:
        started = time.monotonic()
        try:
            self._reconciler.reconcile(key)
            self._tries.pop(key, None)
        except OrchError as error:
            # the lease is late: it will be renewed, or this process ends
            if error.exit == Exit.FENCED:
                self._look_later(key, _RETRY_S[0])
            else:
                tries = self._tries[key] = self._tries.get(key, 0) + 1
                log.warning("%s: %s", key, error.message)
                self._look_later(key, _RETRY_S[min(tries, len(_RETRY_S)) - 1])
        except Exception:
            log.exception("%s: internal error", key)
            self._look_later(key, _RETRY_S[-1])
        finally:
            now = time.monotonic()
            self._series.reconciled(started - since, now - started)
            with self._wake:
                self._busy.discard(key)
                self._wake.notify()


_ENDED_BY_SIGNAL = "asked to end"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the controller: `python -m orchestrator.backends.kubernetes.controller`."""
    args = _parse(argv)
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        force=True,
    )
    os.umask(0o077)
    Path(args.home).mkdir(mode=0o700, parents=True, exist_ok=True)
    for kind in DECODED:
        decoder(kind)
    cluster = Cluster(None, args.namespace)
    try:
        series = Series(args.metrics_port)
    except OSError as error:
        log.error("port %d for metrics: %s", args.metrics_port, error.strerror)
        return int(Exit.CONFIG)
    election = Election(cluster, args.identity, args.lease_s)
    controllers: list[Controller] = []

    def on_signal(*_: object) -> None:
        for controller in controllers:
            controller.end(_ENDED_BY_SIGNAL)
        if not controllers:
            os._exit(0)  # it waits to lead, and holds nothing

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        election.wait()
        controller = Controller(
            cluster,
            election,
            not args.one_namespace,
            args.home,
            series,
        )
        controllers.append(controller)
        code = controller.run()
        if code == Exit.DONE:
            election.release()
        os._exit(code)  # threads that still wait for an answer must not act any more
    except OrchError as error:
        log.error("%s", error.message)
        return int(error.exit)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="orchestrator.backends.kubernetes.controller", description="Runs TrainRuns."
    )
    parser.add_argument(
        "--namespace",
        help="the namespace of the controller's lease and ledger (default: the pod's)",
    )
    parser.add_argument(
        "--one-namespace",
        action="store_true",
        help="only TrainRuns of that namespace",
    )
    parser.add_argument(
        "--identity",
        default=f"{platform.node()}-{os.getpid()}",
        help="name of this replica",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        default=9404,
        help="port of the metrics; 0: none",
    )
    parser.add_argument("--home", default="/tmp/orch", help="folder of stored plans")
    parser.add_argument(
        "--lease-s",
        type=float,
        default=15.0,
        help="seconds after which another replica takes over",
    )
    return parser.parse_args(argv)
