"""The coordinator's eye on a running epoch: what all agents see, put together about once a second."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.launch.request import Policy
from orchestrator.plan import Plan

from .diagnose import Verdict, diagnose, gathered, slow_nodes
from .messages import Seen
from .watch import is_frozen

_EVERY_S = 0.9
_SURE_LOOKS = 5  # at slow nodes, one after the other, before they are called so


class Lookout:
    def __init__(self, rules: Policy):
        self._rules = rules
        self._plan: Plan | None = None
        self._seen: dict[str, Sequence[Seen]] = {}  # by node, what its agent said last
        self._looked = float("-inf")
        self._urgent = False
        self._slow: dict[str, int] = {}  # node -> looks in a row
        self._told: frozenset[str] = frozenset()

    def begin_epoch(self, plan: Plan) -> None:
        self._plan = plan
        self._seen.clear()
        self._slow.clear()
        self._looked, self._urgent = float("-inf"), False

    def hear(self, node: str, seen: Sequence[Seen]) -> None:
        self._seen[node] = seen
        self._urgent = any(map(is_frozen, seen))

    def verdict(self, now: float) -> Verdict | None:
        """What is wrong, if anything. `now`: loop time; most calls return at once, for agents by the thousand speak."""
        if now - self._looked < _EVERY_S and not self._urgent:
            return None
        self._looked = now
        everyone = gathered(self._seen, self._plan)
        self._count_slow(everyone)
        return diagnose(self._plan, everyone, self._rules)

    def slow(self) -> dict[str, float] | None:
        """Nodes that are slow now, with their ratios, when they are others than those told last; else None."""
        sure = {node for node, looks in self._slow.items() if looks >= _SURE_LOOKS}
        if sure == self._told:
            return None
        self._told = frozenset(sure)
        return {node: self._ratios[node] for node in sorted(sure)}

    def _count_slow(self, everyone: list[Seen]) -> None:
        self._ratios = slow_nodes(self._plan, everyone, self._rules.straggler_ratio)
        self._slow = {node: self._slow.get(node, 0) + 1 for node in self._ratios}
