"""Progress monitor: the status of a node's workers, from their progress reports and the kernel.

It counts examinations, not seconds, so that a pause of this agent does not count against its
workers. It does not judge: whether a worker without progress is at fault shows only in comparison
with the others (`faults.diagnosis`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan.worker import ProgressReport, StepReport
from orchestrator.run.processes import Identity, Load, identity, load_of

LOOK_S = 0.5  # between two examinations of the workers
_USUAL_STEPS = 32  # steps of which the median is taken
_OWN_STEPS = 8  # own compute times of which the median is taken; a straggler shows after five
_BUSY_LOOKS = 4
_MAX_CHARS = 120


@dataclass
class _Rank:
    """The progress of one worker. Counts of looks are since its last progress, step or report."""

    process: Identity | None = None
    report: ProgressReport | None = None
    next_step: int = 0  # the step after the last completed one; `report` may be older
    still_looks: int = 0
    step_looks: int = 0
    silent_looks: int = 0
    stopped_looks: int = 0
    load: Load | None = None
    #: CPU seconds between two looks.
    used_s: deque[float] = field(default_factory=lambda: deque(maxlen=_BUSY_LOOKS))
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_STEPS))
    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=_OWN_STEPS))

    def examine(self, pid: int) -> None:
        """Updates the counts of looks and the load of the process."""
        process = identity(pid)
        if process != self.process:
            self.process = process
            self.load = None
        previous_load = self.load
        self.load = load_of(process) if process else None
        has_run = self.silent_looks == 0
        if previous_load and self.load:
            used_s = self.load.cpu_s - previous_load.cpu_s
            self.used_s.append(used_s)
            has_run = has_run or used_s > 0
        self.still_looks += 1
        self.step_looks += 1
        self.silent_looks += 1
        if self.load is None or self.load.state != "T":
            self.stopped_looks = 0
        elif has_run:  # stopped and continued in turn: slow, not frozen
            self.stopped_looks = 1
        else:
            self.stopped_looks += 1

    def status(self, rank: int) -> WorkerStatus:
        report = self.report
        silent_s = self.silent_looks * LOOK_S if report else None
        status = WorkerStatus(
            rank=rank,
            step=self.next_step,
            still_s=self.still_looks * LOOK_S,
            step_s=self.step_looks * LOOK_S,
            silent_s=silent_s,
            stopped_s=self.stopped_looks * LOOK_S,
            state=self.load.state if self.load else "?",
            busy=self._busy(),
            usual_step_s=_median(self.steps_s, at_least=2),
            usual_own_s=_median(self.own_s, at_least=5),
        )
        if report is None or report.step < self.next_step:
            return status
        return structs.replace(
            status,
            step=report.step,
            phase=_printable(report.phase),
            limit_s=report.limit_s,
            waiting=_printable(report.waiting) if report.waiting else None,
        )

    def _busy(self) -> float:
        if not self.used_s:
            return 0.0
        return round(sum(self.used_s) / (len(self.used_s) * LOOK_S), 2)


class ProgressMonitor:
    """Watches the progress of one node's workers. See the module."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def begin_epoch(self) -> None:
        self._ranks.clear()

    def on_step(self, report: StepReport) -> None:
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.still_looks = 0
        rank.step_looks = 0
        if report.step < rank.next_step:  # another report of a step takes next to no time
            return
        rank.next_step = report.step + 1
        rank.steps_s.append(report.step_s)
        if report.own_s is not None:
            rank.own_s.append(report.own_s)

    def on_progress(self, report: ProgressReport) -> None:
        rank = self._ranks.setdefault(report.rank, _Rank())
        previous = rank.report
        rank.report = report
        rank.silent_looks = 0
        if previous is None or _begins_step(previous, report):
            rank.step_looks = 0
        if previous is None or _position(previous) != _position(report):
            rank.still_looks = 0

    def look(self, pids: Mapping[int, int]) -> list[WorkerStatus]:
        """Examines the workers that are alive and returns their statuses.

        To be called every LOOK_S. `pids` are by rank; pid 0 is a worker that is being started.
        """
        return [self._look(rank, pid) for rank, pid in sorted(pids.items()) if pid]

    def _look(self, rank: int, pid: int) -> WorkerStatus:
        worker = self._ranks.setdefault(rank, _Rank())
        worker.examine(pid)
        return worker.status(rank)


def _median(seconds: Collection[float], at_least: int) -> float | None:
    return statistics.median(seconds) if len(seconds) >= at_least else None


def _printable(untrusted: str) -> str:
    """Returns a worker's text, safe to print on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in untrusted[:_MAX_CHARS])


def _begins_step(previous: ProgressReport, report: ProgressReport) -> bool:
    """Whether a step begins between two reports of a rank. A pause within a step is no part of it:
    the step begins anew."""
    after_pause = previous.is_pause and not report.is_pause
    return after_pause or previous.step != report.step


def _position(report: ProgressReport) -> tuple:
    return report.step, report.phase, report.waiting, report.moves
