"""The controller's process: leads or waits to, and then watches, reconciles and decides until it is
told to end."""

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

#: What threads decode beside what is watched; see decoder.
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
_COALESCE_S = 0.02  # changes that come together are looked at together
_DECIDE_S = 0.1  # between two decisions, at least
_CLAIMS_S = 5.0  # between two while a run waits for GPUs that others hold by claims
_RETRY_S = (0.5, 2.0, 10.0, 30.0)

log = logging.getLogger("orch.controller")


class Controller:
    """One that leads. `run` returns the exit code of the process."""

    def __init__(
        self, cluster: Cluster, election: Election, everywhere: bool, home: str, series: Series
    ):
        self._election = election
        self._series = series
        self._wake = threading.Condition()
        self._due: list[tuple[float, str]] = []  # a heap of when which run is looked at again
        self._timers: dict[str, float] = {}  # of these the one that counts, for each
        self._dirty: dict[str, float] = {}  # since when
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
            cluster, self._store, self._ledger, self._decisions, self._planner, self._reports, self._again,
            lambda: election.leads and not self._over,
        )  # fmt: skip
        self._cluster = cluster
        self._everywhere = everywhere

    # ---------------------------------------------------------------------------------- any thread

    def dirty(self, key: str) -> None:
        """The run is looked at as soon as nobody does."""
        with self._wake:
            self._dirty.setdefault(key, time.monotonic())
            self._wake.notify()

    def _again(self, key: str, seconds: float) -> None:
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
            for key, one in list(self._ledger.book.allocations.items()):
                if node in one.nodes or not all(one.nodes):
                    self.dirty(key)

    def end(self, why: str) -> None:
        with self._wake:
            self._over = self._over or why
            self._wake.notify()

    # ------------------------------------------------------------------------------ the main thread

    def run(self) -> int:
        self._election.keep(lambda: self.end("the lease is lost"))
        self._store.start()
        if not self._ledger.load() or not self._ledger.book.allocations:
            self._ledger.write(rebuilt(self._cluster, self._store, self._everywhere))
        self._series.publish(self._store.runs.all, self._ledger)
        self._reports.start()
        for one in self._store.runs.all():
            self.dirty(one.key)
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
        return int(Exit.DONE if self._over == _ASKED else Exit.FENCED)

    def _loop(self, pool: ThreadPoolExecutor) -> None:
        decided = 0.0
        wanted = False
        while True:
            with self._wake:
                wait = min([1.0, *(max(0.0, at - time.monotonic()) for at, _ in self._due[:1])])
                idle = not any(key not in self._busy for key in self._dirty)
                if (
                    idle
                    and not wanted
                    and not self._room_changed
                    and not self._decisions.news
                    and not self._over
                ):
                    self._wake.wait(wait)
                if self._over:
                    return
                now = time.monotonic()
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
                since = {key: self._dirty.pop(key) for key in chosen}
                self._busy.update(chosen)
                changed = self._room_changed
                self._room_changed = False
                resting = not chosen and bool(self._dirty)
            for key in chosen:
                pool.submit(self._look, key, since[key])
            wanted = wanted or changed
            if now > decided + _CLAIMS_S and self._decisions.waits_for_claims:
                wanted = True
            if (wanted and self._decisions.anything) or self._decisions.news:
                if now < decided + _DECIDE_S:
                    time.sleep(_COALESCE_S)
                    continue
                wanted = False
                decided = now
                self._decide()
            else:
                wanted = False
                if resting:
                    time.sleep(_COALESCE_S)

    def _decide(self) -> None:
        began = time.monotonic()
        try:
            self._decisions.decide(time.time())
        except OrchError as error:  # asked again by who needs it
            log.warning("nothing decided: %s", error.message)
            time.sleep(1.0)
            with self._wake:
                self._room_changed = True
        self._series.decided(time.monotonic() - began)

    def _look(self, key: str, since: float) -> None:
        began = time.monotonic()
        try:
            self._reconciler.reconcile(key)
            self._tries.pop(key, None)
        except OrchError as error:
            if error.exit == Exit.FENCED:  # the lease is late: it is renewed, or this process ends
                self._again(key, _RETRY_S[0])
            else:
                tries = self._tries[key] = self._tries.get(key, 0) + 1
                log.warning("%s: %s", key, error.message)
                self._again(key, _RETRY_S[min(tries, len(_RETRY_S)) - 1])
        except Exception:
            log.exception("%s: internal error", key)
            self._again(key, _RETRY_S[-1])
        finally:
            now = time.monotonic()
            self._series.reconciled(began - since, now - began)
            with self._wake:
                self._busy.discard(key)
                self._wake.notify()


_ASKED = "asked to end"


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m orchestrator.kubernetes.controller`."""
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
    told = threading.Event()
    found: list[Controller] = []

    def on_signal(*_: object) -> None:
        told.set()
        for one in found:
            one.end(_ASKED)
        if not found:
            os._exit(0)  # waits to lead: nothing is held

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        election.wait()
        controller = Controller(cluster, election, not args.one_namespace, args.home, series)
        found.append(controller)
        code = controller.run()
        if code == Exit.DONE:
            election.release()
        os._exit(code)  # threads that still wait for an answer act no more
    except OrchError as error:
        log.error("%s", error.message)
        return int(error.exit)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="orchestrator.kubernetes.controller", description="Runs TrainRuns."
    )
    parser.add_argument(
        "--namespace",
        help="of the controller itself: its lease and its ledger; left out: the pod's",
    )
    parser.add_argument(
        "--one-namespace", action="store_true", help="only TrainRuns of that namespace"
    )
    parser.add_argument(
        "--identity", default=f"{platform.node()}-{os.getpid()}", help="of this replica"
    )
    parser.add_argument("--metrics-port", type=int, default=9404, help="0: none")
    parser.add_argument(
        "--home", default="/tmp/orch", help="a folder for plans that were made before"
    )
    parser.add_argument(
        "--lease-s", type=float, default=15.0, help="after which another replica takes over"
    )
    return parser.parse_args(argv)
