"""Hang and straggler detector: evaluates the reports of all agents about once per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan import Plan
from orchestrator.run.request import Policy

from .diagnosis import Diagnosis, diagnose, peer_medians_s, reported_workers, slowdown

_EVERY_S = 0.9  # between two diagnoses
_COMPARE_S = 0.4  # between two comparisons; for 16,384 ranks one takes 50 ms
#: Thresholds in reports of an agent: one or two per second, each about the last eight steps. Naming
#: a straggler costs nothing; replacing it costs an epoch, so a machine that was busy for a moment
#: is not replaced.
_SURE_REPORTS = 2
_LASTING_REPORTS = 10
_OVER_REPORTS = 4


@dataclass
class _Slow:
    ratio: float = 1.0
    reports: int = 0  # reports in which the node is slow
    normal_reports: int = 0  # consecutive last reports in which it is not


class HangDetector:
    """Detects hangs and stragglers for one coordinator. Call `begin_epoch` before anything else."""

    _plan: Plan

    def __init__(self, rules: Policy):
        self._rules = rules
        # node -> its agent's last report
        self._last_reports: dict[str, Sequence[WorkerStatus]] = {}
        self._peer_medians_s: Mapping[tuple[str, int], float] = {}
        self._diagnosed_at = float("-inf")  # loop time
        self._compared_at = float("-inf")  # loop time
        self._urgent = False
        self._slow: dict[str, _Slow] = {}
        self._reported: frozenset[str] = frozenset()

    def begin_epoch(self, plan: Plan) -> None:
        self._plan = plan
        self._last_reports.clear()
        self._peer_medians_s = {}
        self._slow.clear()
        self._diagnosed_at = float("-inf")
        self._compared_at = float("-inf")
        self._urgent = False

    def add_report(self, node: str, workers: Sequence[WorkerStatus], now: float) -> None:
        """Adds one report of an agent. `now` is the loop time in seconds."""
        self._last_reports[node] = workers
        self._urgent = any(worker.is_frozen for worker in workers)
        if now - self._compared_at >= _COMPARE_S:
            self._compared_at = now
            everyone = reported_workers(self._last_reports, self._plan)
            self._peer_medians_s = peer_medians_s(self._plan, everyone)
        node_workers = reported_workers({node: workers}, self._plan)
        ratio = slowdown(
            self._plan,
            node_workers,
            self._peer_medians_s,
            self._rules.straggler_ratio,
        )
        self._update_slow(node, ratio)

    def diagnosis(self, now: float, ended_ranks: Sequence[int] = ()) -> Diagnosis | None:
        """Returns the diagnosis of a hang, or None. `ended_ranks` have ended without an error.

        Most calls return at once, since thousands of agents report.
        """
        if now - self._diagnosed_at < _EVERY_S and not self._urgent:
            return None
        self._diagnosed_at = now
        return diagnose(
            self._plan,
            reported_workers(self._last_reports, self._plan),
            self._rules,
            ended_ranks,
        )

    def new_stragglers(self) -> dict[str, float] | None:
        """Returns the stragglers and their ratios if they have changed since the last call."""
        slowdowns = self._slow_for(_SURE_REPORTS)
        if slowdowns.keys() == self._reported:
            return None
        self._reported = frozenset(slowdowns)
        return slowdowns

    def lastingly_slow(self) -> dict[str, float]:
        """Returns the nodes and ratios that have been slow for long enough to be replaced."""
        return self._slow_for(_LASTING_REPORTS)

    def _slow_for(self, reports: int) -> dict[str, float]:
        return {
            node: slow.ratio for node, slow in sorted(self._slow.items()) if slow.reports >= reports
        }

    def _update_slow(self, node: str, ratio: float | None) -> None:
        slow = self._slow.get(node)
        if ratio is not None:
            slow = self._slow.setdefault(node, _Slow())
            slow.ratio = ratio
            slow.reports += 1
            slow.normal_reports = 0
        elif slow:
            slow.normal_reports += 1
            if slow.reports < _SURE_REPORTS or slow.normal_reports >= _OVER_REPORTS:
                del self._slow[node]
