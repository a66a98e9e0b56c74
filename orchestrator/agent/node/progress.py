"""Progress monitor: the status of a node's workers, from their progress reports and from the
kernel.

It counts its examinations, not seconds, so that a pause of this agent does not count against its
workers. Nothing is judged here: whether a worker without progress is at fault shows only against
the others (`faults.diagnosis`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan.worker import ProgressReport, StepReport
from orchestrator.run.processes import Identity, Load, identity, load_of

LOOK_S = 0.5
_USUAL_STEPS = 32  # that a median is taken of
_OWN_STEPS = 8  # of own compute time: a straggler shows after five
_BUSY_LOOKS = 4
_MAX_CHARS = 120


@dataclass
class _Rank:
    process: Identity | None = None
    report: ProgressReport | None = None
    next_step: int = (
        0  # the step after the last that was completed: `report` may be older than that
    )
    still_looks: int = 0  # looks
    step_looks: int = 0
    silent_looks: int = 0
    stopped_looks: int = 0
    load: Load | None = None
    used_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=_BUSY_LOOKS)
    )  # CPU seconds between looks
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_STEPS))
    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=_OWN_STEPS))


class ProgressMonitor:
    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def begin_epoch(self) -> None:
        self._ranks.clear()

    def on_step(self, report: StepReport) -> None:
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.still_looks = rank.step_looks = 0
        rank.next_step = report.step + 1
        rank.steps_s.append(report.step_s)
        if report.own_s is not None:
            rank.own_s.append(report.own_s)

    def on_progress(self, report: ProgressReport) -> None:
        rank = self._ranks.setdefault(report.rank, _Rank())
        previous = rank.report
        rank.report = report
        rank.silent_looks = 0
        if previous is None or previous.step != report.step:
            rank.step_looks = 0
        if previous is None or _position(previous) != _position(report):
            rank.still_looks = 0

    def look(self, pids: Mapping[int, int]) -> list[WorkerStatus]:
        """The status of the workers that are alive, to be called every LOOK_S. `pids`: by rank, 0:
        being started."""
        return [self._look(rank, pid) for rank, pid in sorted(pids.items()) if pid]

    def _look(self, rank: int, pid: int) -> WorkerStatus:
        one = self._ranks.setdefault(rank, _Rank())
        process = identity(pid)
        if process != one.process:
            one.process = process
            one.load = None
        previous_load = one.load
        one.load = load_of(process) if process else None
        if previous_load and one.load:
            one.used_s.append(one.load.cpu_s - previous_load.cpu_s)
        stopped = one.load is not None and one.load.state == "T"
        ran = one.silent_looks == 0 or (
            previous_load is not None
            and one.load is not None
            and one.load.cpu_s > previous_load.cpu_s
        )
        one.still_looks = one.still_looks + 1
        one.step_looks = one.step_looks + 1
        one.silent_looks = one.silent_looks + 1
        one.stopped_looks = (
            (1 if ran else one.stopped_looks + 1) if stopped else 0
        )  # stopped and continued in turn: slow, not frozen
        report = one.report
        current = report if report and report.step >= one.next_step else None
        return WorkerStatus(
            rank=rank,
            step=current.step if current else one.next_step,
            phase=_printable(current.phase) if current else "",
            waiting=_printable(current.waiting) if current and current.waiting else None,
            still_s=one.still_looks * LOOK_S,
            step_s=one.step_looks * LOOK_S,
            silent_s=one.silent_looks * LOOK_S if report else None,
            stopped_s=one.stopped_looks * LOOK_S,
            state=one.load.state if one.load else "?",
            busy=round(sum(one.used_s) / (len(one.used_s) * LOOK_S), 2) if one.used_s else 0.0,
            usual_step_s=statistics.median(one.steps_s) if len(one.steps_s) > 1 else None,
            usual_own_s=statistics.median(one.own_s) if len(one.own_s) > 4 else None,
        )


def _printable(untrusted: str) -> str:
    """A worker's text, safe to print on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in untrusted[:_MAX_CHARS])


def _position(report: ProgressReport) -> tuple:
    return report.step, report.phase, report.waiting, report.moves
