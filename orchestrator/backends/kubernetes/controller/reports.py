"""The runs' own reports: the status lines in their pods' logs, read at intervals by a few threads.

The pod with the coordinator writes the run's state; in an elastic run that may be any pod. The pod
that last had a report is read first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import Struct

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.observer import LOG_LINES, LastReport, parse_report
from orchestrator.errors import OrchError
from orchestrator.observe.timeline import StepLine
from orchestrator.plan.codec import UNREADABLE

from .status import Report

_EVERY_S = 10.0
_THREADS = 4
_LOGS_PER_S = 20.0  # at most; with many runs each is read less often
_MOST_PODS = 3  # pods whose logs are read for one run at once

_NONE = Report()


class _Run(Struct):
    generation: int
    pods: Sequence[str]  # the pods that have started, by index
    due: float = 0.0
    first: int = 0  # index into pods of the pod that is read first
    busy: bool = False
    report: Report = _NONE


class Reports:
    """Reads the reports of the watched runs. `changed(key)` is called when a run has a new
    report."""

    def __init__(self, cluster: Cluster, changed: Callable[[str], None]):
        self._cluster = cluster
        self._changed = changed
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._runs: dict[str, _Run] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="reports")

    def start(self) -> None:
        threading.Thread(target=self._loop, name="reports", daemon=True).start()

    def stop(self) -> None:
        self._end.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def watch(self, key: str, generation: int, pods: Sequence[str]) -> None:
        with self._lock:
            run = self._runs.setdefault(key, _Run(generation, pods))
            if run.generation != generation or (pods and not run.pods):
                run.due = 0.0
            run.generation = generation
            run.pods = pods

    def get(self, key: str) -> Report:
        with self._lock:
            return self._runs[key].report if key in self._runs else _NONE

    def forget(self, key: str) -> None:
        with self._lock:
            self._runs.pop(key, None)

    def _loop(self) -> None:
        while not self._end.wait(0.5):
            now = time.monotonic()
            with self._lock:
                due = [
                    key
                    for key, run in self._runs.items()
                    if run.pods and not run.busy and run.due <= now
                ]
                every = max(_EVERY_S, len(self._runs) / _LOGS_PER_S)
                for key in due:
                    self._runs[key].busy = True
                    self._runs[key].due = now + every
            for key in due:
                self._pool.submit(self._read, key)

    def _read(self, key: str) -> None:
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                return
            generation = run.generation
            pods = list(run.pods)
            first = run.first
        cluster = self._cluster.within(key.partition("/")[0])
        last_report = LastReport()
        index = first
        for turn in range(min(_MOST_PODS, len(pods))):
            index = (first + turn) % len(pods)
            try:
                last_report = parse_report(cluster.log(pods[index], tail=LOG_LINES))
            except OrchError:
                continue
            if last_report.state is not None:
                break
        else:
            index = (first + _MOST_PODS) % max(1, len(pods))
        report = _report(generation, last_report)
        with self._lock:
            run = self._runs.get(key)
            if run is None:
                return
            run.busy = False
            run.first = index
            same_start = run.generation == generation
            news = same_start and last_report.state is not None and report != run.report
            if news:
                run.report = report
        if news:
            self._changed(key)


def _report(generation: int, last_report: LastReport) -> Report:
    step: StepLine | None = None
    if last_report.step:
        try:
            step = msgspec.json.decode(last_report.step, type=StepLine)
        except UNREADABLE:
            step = None
    return Report(generation, last_report.state, step, last_report.ettr)
