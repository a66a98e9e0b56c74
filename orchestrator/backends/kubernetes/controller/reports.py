"""What runs say of themselves: the status lines in their pods' logs, read now and then by a few
threads.

A run's state is written by the pod with its coordinator, which in an elastic run may be any. The
one that last had one is asked first.
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
_AT_ONCE = 4
_PER_S = 20.0  # logs that are read a second, at most: of many runs each is asked less often
_TRIED = 3  # pods that are asked for one run at once

_NONE = Report()


class _Run(Struct):
    generation: int
    pods: Sequence[str]  # that run, by index
    due: float = 0.0
    asked: int = 0  # index into pods of who is asked first
    busy: bool = False
    found: Report = _NONE


class Reports:
    """`changed(key)`: a run has said something new."""

    def __init__(self, cluster: Cluster, changed: Callable[[str], None]):
        self._cluster = cluster
        self._changed = changed
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._runs: dict[str, _Run] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="reports")

    def start(self) -> None:
        threading.Thread(target=self._loop, name="reports", daemon=True).start()

    def stop(self) -> None:
        self._end.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def watch(self, key: str, generation: int, pods: Sequence[str]) -> None:
        with self._lock:
            one = self._runs.setdefault(key, _Run(generation, pods))
            if one.generation != generation or (pods and not one.pods):
                one.due = 0.0
            one.generation = generation
            one.pods = pods

    def get(self, key: str) -> Report:
        with self._lock:
            return self._runs[key].found if key in self._runs else _NONE

    def forget(self, key: str) -> None:
        with self._lock:
            self._runs.pop(key, None)

    def _loop(self) -> None:
        while not self._end.wait(0.5):
            now = time.monotonic()
            with self._lock:
                due = [
                    key
                    for key, one in self._runs.items()
                    if one.pods and not one.busy and one.due <= now
                ]
                every = max(_EVERY_S, len(self._runs) / _PER_S)
                for key in due:
                    self._runs[key].busy = True
                    self._runs[key].due = now + every
            for key in due:
                self._pool.submit(self._read, key)

    def _read(self, key: str) -> None:
        with self._lock:
            one = self._runs.get(key)
            if one is None:
                return
            generation = one.generation
            pods = list(one.pods)
            first = one.asked
        space = self._cluster.within(key.partition("/")[0])
        found = LastReport()
        asked = first
        for turn in range(min(_TRIED, len(pods))):
            asked = (first + turn) % len(pods)
            try:
                found = parse_report(space.log(pods[asked], tail=LOG_LINES))
            except OrchError:
                continue
            if found.state is not None:
                break
        else:
            asked = (first + _TRIED) % max(1, len(pods))
        report = _report(generation, found)
        with self._lock:
            if (one := self._runs.get(key)) is None:
                return
            one.busy = False
            one.asked = asked
            news = one.generation == generation and found.state is not None and report != one.found
            if news:
                one.found = report
        if news:
            self._changed(key)


def _report(generation: int, found: LastReport) -> Report:
    step: StepLine | None = None
    if found.step:
        try:
            step = msgspec.json.decode(found.step, type=StepLine)
        except UNREADABLE:
            step = None
    return Report(generation, found.state, step, found.ettr)
