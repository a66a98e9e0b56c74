"""Records a node's reports in three forms: lines of metrics, lines of events, Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from orchestrator.observe.goodput.intervals import WallState
from orchestrator.plan import Plan
from orchestrator.plan.worker import EventReport, ProgressReport, StepReport
from orchestrator.run.folder import RunFolder

from .metrics import NodeMetrics
from .progress import ProgressMonitor
from .worker_reports import JsonLines, parse, stamped

#: Events of this node -> the state that its time counts as afterwards.
_STATE_AFTER_EVENT: dict[str, WallState] = {
    "workers_started": "startup",
    "flush_started": "checkpoint_stall",
    "worker_ended": "rendezvous",
    "coordinator_lost": "rendezvous",
}
_MAX_FAILURE_CHARS = 500  # of a worker's description of its failure
_MAX_UNREADABLE = 5  # unreadable lines recorded per epoch


class Recorder:
    """Records the reports of one node. `clock` returns Unix seconds."""

    def __init__(
        self,
        folder: RunFolder,
        node: str,
        plan: Plan,
        clock: Callable[[], float] = time.time,
    ):
        self.node = node
        self.metrics = NodeMetrics(folder.run_id, node, plan)
        self._clock = clock
        self._steps = JsonLines(folder.metrics(node))
        self._events = JsonLines(folder.events(node))
        self._epoch = -1
        self._unreadable = 0
        self.last_step: dict[int, int] = {}  # rank -> last step it reported in this epoch
        self._self_reporting: set[int] = set()  # ranks that report their steps
        self._failures: dict[int, EventReport] = {}  # rank -> its report of a failure
        self.progress = ProgressMonitor()

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._unreadable = 0
        self.last_step.clear()
        self._failures.clear()
        self.progress.begin_epoch()
        self.metrics.begin_epoch(epoch)

    def replan(self, plan: Plan) -> None:
        self.metrics.replan(plan)

    @property
    def furthest_step(self) -> int | None:
        return max(self.last_step.values(), default=None)

    def failure_of(self, rank: int) -> dict[str, str]:
        """Returns `cause` and `error` of a worker's failure as it reported them, or ""."""
        fields = self._failures[rank].fields if rank in self._failures else {}
        return {
            name: str(fields.get(name) or "")[:_MAX_FAILURE_CHARS] for name in ("cause", "error")
        }

    def on_line(self, rank: int, line: bytes) -> None:
        """Records one line of a worker's report pipe."""
        report = parse(line, rank, self._epoch)
        received_at = self._clock()
        if isinstance(report, StepReport):
            self._self_reporting.add(rank)
            self._on_step(report, line, received_at)
        elif isinstance(report, ProgressReport):
            self.progress.on_progress(report)
        elif isinstance(report, EventReport):
            self._events.write(stamped(line, received_at))
            self._on_event(rank, report, received_at)
        else:
            self._on_unreadable(rank, line)

    def _on_event(self, rank: int, report: EventReport, received_at: float) -> None:
        self.metrics.on_event(report, received_at)
        if report.name == "failed":
            self._failures[rank] = report
        elif report.name == "checkpoint_saved" and report.step is not None:
            self.last_step.setdefault(rank, report.step)  # a final checkpoint reports no steps
        elif report.name == "stopping":  # the last save follows
            self.metrics.enter("checkpoint_stall")

    def _on_unreadable(self, rank: int, line: bytes) -> None:
        self._unreadable += 1
        self.metrics.add("orch_reports_unreadable", 1)
        if self._unreadable <= _MAX_UNREADABLE:
            sample = line[:200].decode(errors="backslashreplace")
            self.event("report_unreadable", rank=rank, line=sample)

    def on_printed_step(self, report: StepReport) -> None:
        """Records a step that a worker printed, unless the worker reports its steps itself."""
        if report.rank not in self._self_reporting:
            self._on_step(report, msgspec.json.encode(report), self._clock())

    def _on_step(self, report: StepReport, line: bytes, at: float) -> None:
        self.last_step[report.rank] = report.step
        self._steps.write(stamped(line, at))
        self.progress.on_step(report)
        self.metrics.on_step(report, at)

    def event(self, name: str, **fields: object) -> None:
        """Writes an event of the agent or the coordinator."""
        if name in _STATE_AFTER_EVENT:
            self.metrics.enter(_STATE_AFTER_EVENT[name])
        record = {
            "kind": "agent",
            "name": name,
            "node": self.node,
            "epoch": self._epoch,
            **fields,
        }
        self._events.write(stamped(msgspec.json.encode(record), self._clock()))

    def close(self) -> None:
        self._steps.close()
        self._events.close()
