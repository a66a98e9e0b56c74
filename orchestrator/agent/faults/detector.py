"""Hang and straggler detector: evaluates what all agents report of a running epoch, about once a
second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan import Plan
from orchestrator.run.request import Policy

from .diagnosis import Diagnosis, diagnose, gathered, peers_usual, slowdown

_EVERY_S = 0.9
_COMPARE_S = 0.4  # for 16,384 ranks it takes 50 ms each
#: Reports of an agent, one or two a second, each about the last eight steps. To name a straggler
#: costs nothing; to replace it costs an epoch, which a machine that was busy for a moment is not
#: worth.
_SURE_REPORTS = 2
_LASTING_REPORTS = 10
_OVER_REPORTS = 4


@dataclass
class _Slow:
    ratio: float = 1.0
    reports: int = 0  # in which it is slow
    against: int = 0  # the last ones, in which it is not


class HangDetector:
    """One per coordinator. Call `begin_epoch` before anything else."""

    _plan: Plan

    def __init__(self, rules: Policy):
        self._rules = rules
        self._seen: dict[
            str, Sequence[WorkerStatus]
        ] = {}  # by node, what its agent has reported last
        self._peers: Mapping[tuple[str, int], float] = {}
        self._looked = self._compared = float("-inf")  # loop times
        self._urgent = False
        self._slow: dict[str, _Slow] = {}
        self._told: frozenset[str] = frozenset()

    def begin_epoch(self, plan: Plan) -> None:
        self._plan = plan
        self._seen.clear()
        self._peers = {}
        self._slow.clear()
        self._looked = self._compared = float("-inf")
        self._urgent = False

    def hear(self, node: str, workers: Sequence[WorkerStatus], now: float) -> None:
        """Takes one report of an agent. `now`: loop time, seconds."""
        self._seen[node] = workers
        self._urgent = any(worker.is_frozen for worker in workers)
        if now - self._compared >= _COMPARE_S:
            self._compared, self._peers = (
                now,
                peers_usual(self._plan, gathered(self._seen, self._plan)),
            )
        node_workers = gathered({node: workers}, self._plan)
        self._count(node, slowdown(self._plan, node_workers, self._peers, self._rules.straggler_ratio))

    def diagnosis(self, now: float) -> Diagnosis | None:
        """What is wrong, None for nothing. Most calls return at once, since thousands of agents
        report."""
        if now - self._looked < _EVERY_S and not self._urgent:
            return None
        self._looked = now
        return diagnose(self._plan, gathered(self._seen, self._plan), self._rules)

    def slow(self) -> dict[str, float] | None:
        """Stragglers with their ratios, if they are others than those returned last; else None."""
        slowdowns = self._since(_SURE_REPORTS)
        if slowdowns.keys() == self._told:
            return None
        self._told = frozenset(slowdowns)
        return slowdowns

    def lastingly_slow(self) -> dict[str, float]:
        """Nodes that have been stragglers for long enough to replace them, with their ratios."""
        return self._since(_LASTING_REPORTS)

    def _since(self, reports: int) -> dict[str, float]:
        return {
            node: slow.ratio for node, slow in sorted(self._slow.items()) if slow.reports >= reports
        }

    def _count(self, node: str, ratio: float | None) -> None:
        slow = self._slow.get(node)
        if ratio is not None:
            slow = self._slow.setdefault(node, _Slow())
            slow.ratio = ratio
            slow.reports = slow.reports + 1
            slow.against = 0
        elif slow:
            slow.against += 1
            if slow.reports < _SURE_REPORTS or slow.against >= _OVER_REPORTS:
                del self._slow[node]
