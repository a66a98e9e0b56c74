"""The coordinator's pen: every change of the run's state goes through here to `state.json`, whole and in order."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from orchestrator.launch.discovery import Discovery
from orchestrator.launch.report import write_report
from orchestrator.launch.run_folder import RunFolder
from orchestrator.launch.state import EpochState, NodeState, RunState, read_state, write_state
from orchestrator.plan import Plan

from .messages import Join
from .policy import Decision

_MOST_EPOCHS = 64  # kept in the state; events/ has them all

_replace = msgspec.structs.replace


class RunRecord:
    """State of one run. It goes on from what an earlier attempt has left, so that epochs only ever grow."""

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        node: str,
        discovery: Discovery,
        clock: Callable[[], float] = time.time,
    ):
        self._folder, self._plan, self._node = folder, plan, node
        self._discovery, self._clock = discovery, clock
        self._state: RunState = read_state(folder)

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def restarts(self) -> int:
        """Counted restarts of this attempt; `orch resume` begins a new count."""
        return self._state.restarts

    def update(self, **changes: object) -> None:
        self._state = _replace(self._state, **changes, updated_at=self._clock(), writer=self._node)
        write_state(self._folder, self._state)

    def joined(self, joins: dict[str, Join]) -> None:
        """All nodes are here: who they are, and where Prometheus finds them."""
        ranks: dict[str, list[int]] = {node: [] for node in joins}
        for rank in self._plan.ranks:
            ranks[rank.node].append(rank.rank)
        nodes = {
            node: NodeState(state="joined", host=join.host, pid=join.pid, metrics=join.metrics, ranks=ranks[node])
            for node, join in joins.items()
        }
        self._discovery.publish({node: join.metrics for node, join in joins.items() if join.metrics})
        self.update(nodes=nodes, started_at=self._state.started_at or self._clock(), reason=None)

    def begin_epoch(self) -> None:
        """A new epoch, one higher than any before, durable before the first message that carries it."""
        epoch = EpochState(epoch=self._state.epoch + 1, started_at=self._clock())
        self.update(epoch=epoch.epoch, epochs=[*self._state.epochs[-_MOST_EPOCHS:], epoch])

    def running(self) -> None:
        self._nodes("running")
        self._last_epoch(running_at=self._clock())
        self.update(state="running", reason=None)

    def lost(self, node: str) -> None:
        if node in self._state.nodes:
            nodes = self._state.nodes | {node: _replace(self._state.nodes[node], state="lost")}
            self.update(nodes=nodes)

    def end_epoch(self, decision: Decision) -> None:
        outcome = "restart" if decision.again else decision.state
        self._last_epoch(ended_at=self._clock(), outcome=outcome, counted=decision.counted, cause=decision.cause)
        if decision.again:
            self._nodes("joined")
            self.update(state="restarting", reason=decision.reason, restarts=decision.budget.used)

    def finish(self, decision: Decision) -> None:
        """The last word, and the report; the report first, since a reader of the last word looks for it."""
        self._nodes("ended")
        self._discovery.withdraw()
        final = {"state": decision.state, "exit_code": decision.code, "ended_at": self._clock()}
        ended = _replace(self._state, **final, reason=decision.reason, cause=decision.cause)
        write_report(self._folder, self._plan, ended)
        self.update(**final, reason=decision.reason, cause=decision.cause)

    def _nodes(self, state: str) -> None:
        nodes = {n: s if s.state == "lost" else _replace(s, state=state) for n, s in self._state.nodes.items()}
        self._state = _replace(self._state, nodes=nodes)

    def _last_epoch(self, **changes: object) -> None:
        *before, last = self._state.epochs
        self._state = _replace(self._state, epochs=[*before, _replace(last, **changes)])
