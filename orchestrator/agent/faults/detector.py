"""The coordinator's eye on a running epoch: what all agents see, put together about once a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.agent.protocol.messages import WorkerStatus
from orchestrator.plan import Plan
from orchestrator.run.request import Policy

from .diagnosis import Diagnosis, diagnose, gathered, peers_usual, slowdown

_EVERY_S, _COMPARE_S = 0.9, 0.4  # of 16,384 ranks: 50 ms each
#: Words of an agent, one or two a second, each about the last eight steps. To say that a node is slow costs nothing; to
#: go on without it costs an epoch, and a machine that was busy for a moment is none to be left.
_SURE_WORDS, _LASTING_WORDS, _OVER_WORDS = 2, 10, 4


@dataclass
class _Slow:
    ratio: float = 1.0
    words: int = 0  # that say so
    against: int = 0  # the last ones, that do not


class HangDetector:
    def __init__(self, rules: Policy):
        self._rules = rules
        self._plan: Plan | None = None
        self._seen: dict[str, Sequence[WorkerStatus]] = {}  # by node, what its agent said last
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

    def hear(self, node: str, seen: Sequence[WorkerStatus], now: float) -> None:
        """`now`: loop time."""
        self._seen[node] = seen
        self._urgent = any(one.is_frozen for one in seen)
        if now - self._compared >= _COMPARE_S:
            self._compared, self._peers = now, peers_usual(self._plan, gathered(self._seen, self._plan))
        theirs = gathered({node: seen}, self._plan)
        self._count(node, slowdown(self._plan, theirs, self._peers, self._rules.straggler_ratio))

    def diagnosis(self, now: float) -> Diagnosis | None:
        """What is wrong, if anything. Most calls return at once, for agents by the thousand speak."""
        if now - self._looked < _EVERY_S and not self._urgent:
            return None
        self._looked = now
        return diagnose(self._plan, gathered(self._seen, self._plan), self._rules)

    def slow(self) -> dict[str, float] | None:
        """Nodes that are slow now, with their ratios, when they are others than those told last; else None."""
        sure = self._since(_SURE_WORDS)
        if sure.keys() == self._told:
            return None
        self._told = frozenset(sure)
        return sure

    def lastingly_slow(self) -> dict[str, float]:
        """Those that have been so for long enough to go on without them."""
        return self._since(_LASTING_WORDS)

    def _since(self, words: int) -> dict[str, float]:
        return {node: slow.ratio for node, slow in sorted(self._slow.items()) if slow.words >= words}

    def _count(self, node: str, ratio: float | None) -> None:
        if ratio is not None:
            slow = self._slow.setdefault(node, _Slow())
            slow.ratio, slow.words, slow.against = ratio, slow.words + 1, 0
        elif slow := self._slow.get(node):
            slow.against += 1
            if slow.words < _SURE_WORDS or slow.against >= _OVER_WORDS:
                del self._slow[node]
