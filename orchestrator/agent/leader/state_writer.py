"""Writes every change of a run's state to `state.json`, as whole documents and in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from orchestrator.agent.faults.policy import Decision
from orchestrator.agent.protocol.messages import Join
from orchestrator.observe.report import write_report
from orchestrator.plan import Plan
from orchestrator.run.epoch_lease import EpochLease
from orchestrator.run.folder import RECORD_ERRORS, RunFolder
from orchestrator.run.registry import Discovery
from orchestrator.run.state import (
    Cause,
    EpochState,
    NodeState,
    RunState,
    finish,
    read_state,
    write_state,
)

_MAX_EPOCHS = 64  # kept in the state; events/ has all of them

_replace = msgspec.structs.replace
log = logging.getLogger("orch.coordinator")


class StateWriter:
    """The state of one run.

    It continues the state of an earlier attempt, so that epoch numbers only grow. `lease` is the
    lease on the newest epoch of an elastic run. Every write checks it, and raises LeaseLost if
    another process holds it.
    """

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        node: str,
        discovery: Discovery,
        lease: EpochLease | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._folder = folder
        self._plan = plan
        self._node = node
        self._discovery = discovery
        self._lease = lease
        self._clock = clock
        self._state: RunState = read_state(folder)
        self._previous_writer = self._state.writer
        self._unwritten = False  # the newest state is not on disk
        self._written_inode: int | None = None  # of the state file that this process wrote last

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def first_intent(self) -> int:
        """The number of the newest request of people when this attempt began."""
        return self._state.intent

    @property
    def restarts(self) -> int:
        """Counted restarts of this attempt; `orch resume` starts a new count."""
        return self._state.restarts

    @property
    def last_epoch(self) -> EpochState | None:
        return self._state.epochs[-1] if self._state.epochs else None

    @property
    def restarts_by_cause(self) -> dict[str, int]:
        return self._state.restarts_by_cause

    @property
    def causes(self) -> list[Cause]:
        """The failures of this attempt, oldest first, as far as they are kept."""
        epochs = [epoch for epoch in self._state.epochs if epoch.epoch >= self._state.first_epoch]
        return [epoch.cause for epoch in epochs if epoch.cause]

    @property
    def excluded(self) -> dict[str, str]:
        """Node -> reason for which this attempt continues without it."""
        return self._state.excluded

    def exclude(self, node: str, reason: str) -> None:
        self.update(excluded=self._state.excluded | {node: reason})

    def record_stragglers(self, nodes: dict[str, float]) -> None:
        """Records the stragglers: node -> its compute time over the median of its peers."""
        self.update(slow=nodes)

    @property
    def nodes(self) -> dict[str, NodeState]:
        return self._state.nodes

    @property
    def is_final(self) -> bool:
        """True once the run has ended, even if the state on disk does not show it yet."""
        return self._state.is_final

    def check_lease(self) -> None:
        """Raises LeaseLost if another process has become the writer."""
        if self._lease:
            self._lease.check()

    @property
    def leased_epoch(self) -> int:
        """The newest epoch that this process holds the lease on, -1 without a lease."""
        return self._lease.held if self._lease else -1

    def lease_next_epoch(self) -> None:
        """Takes the lease on the next epoch, which begins with `begin_epoch`."""
        if self._lease and self._lease.held <= self._state.epoch:
            self._lease.take(self._state.epoch + 1)

    def update(self, **changes: object) -> None:
        """Changes the state. If it cannot be written now, `retry` writes it later."""
        self._state = _replace(
            self._state,
            **changes,
            updated_at=self._clock(),
            writer=self._node,
        )
        try:
            self._write()
        except RECORD_ERRORS as error:
            log.error("state.json cannot be written; will retry: %s", error)

    def _write(self) -> None:
        self._unwritten = True
        self.check_lease()
        write_state(self._folder, self._state)
        self._unwritten = False
        self._written_inode = self._folder.state.stat().st_ino

    def retry(self) -> None:
        """Writes the newest state if it is not on disk. To be called once per heartbeat."""
        if self._unwritten:
            self._write()

    def rewrite_if_replaced(self) -> None:
        """Writes the state again if another process has replaced the file.

        An older coordinator does so once if it was paused between its check of the lease and its
        rename.
        """
        self.check_lease()
        self.retry()
        if (
            self._written_inode is not None
            and self._folder.state.stat().st_ino != self._written_inode
        ):
            self._write()

    def record_joined(self, joins: dict[str, Join]) -> None:
        """Records the nodes of the next epoch, and publishes their metrics endpoints."""
        ranks: dict[str, list[int]] = {node: [] for node in joins}
        for rank in self._plan.ranks:
            # A node of the plan may be missing here: its loss may not have been handled yet.
            ranks.setdefault(rank.node, []).append(rank.rank)
        nodes = {
            node: NodeState(
                state="joined",
                host=join.host,
                pid=join.pid,
                metrics=join.metrics,
                ranks=ranks[node],
            )
            for node, join in joins.items()
        }
        if self._lease:  # keeps nodes that have left an elastic run
            nodes = self._state.nodes | nodes
        self._publish(nodes)
        self.update(
            nodes=nodes,
            started_at=self._state.started_at or self._clock(),
            reason=None,
        )

    def record_spare(self, node: str, join: Join) -> None:
        """Records a node that has joined as a spare while the others run."""
        spare = NodeState(
            state="joined",
            host=join.host,
            pid=join.pid,
            metrics=join.metrics,
        )
        nodes = self._state.nodes | {node: spare}
        self._publish(nodes)
        self.update(nodes=nodes)

    def _publish(self, nodes: dict[str, NodeState]) -> None:
        endpoints = {
            name: node.metrics
            for name, node in nodes.items()
            if node.state in ("joined", "running") and node.metrics
        }
        self._discovery.publish(endpoints)

    def begin_epoch(self) -> None:
        """Starts an epoch, one higher than any before.

        `retry` must have written it before any agent receives its number.
        """
        self.lease_next_epoch()
        number = self.leased_epoch if self._lease else self._state.epoch + 1
        epoch = EpochState(epoch=number, started_at=self._clock())
        earlier = self._state.epochs[-_MAX_EPOCHS:]
        self.update(epoch=number, epochs=[*earlier, epoch])

    def record_running(self) -> None:
        self._set_node_states("running")
        self._change_last_epoch(running_at=self._clock())
        self.update(state="running", reason=None)

    def take_over(self) -> set[str]:
        """Ends the epoch of the last coordinator and records its node as lost.

        Returns that node, or nothing if it is this node or not a node of the run.
        """
        old_leader = self._previous_writer
        reason = f"{old_leader}: the coordinator is gone"
        cause = Cause(
            kind="coordinator_lost",
            text=reason,
            epoch=self._state.epoch,
            node=old_leader,
        )
        if self._state.epochs and self._state.epochs[-1].outcome is None:
            self._change_last_epoch(
                ended_at=self._clock(),
                outcome="restart",
                cause=cause,
            )
        self.update(state="restarting", reason=reason)
        if old_leader not in self._state.nodes or old_leader == self._node:
            return set()
        if self._state.nodes[old_leader].state != "ended":
            self.record_lost(old_leader)
        return {old_leader}

    def record_plan(self, plan: Plan) -> None:
        """Records another plan as the plan in force."""
        self._plan = plan
        summary = self._state.summary | {"world_size": plan.parallel.world_size}
        self.update(plan_hash=plan.hash, summary=summary)

    def record_lost(self, node: str) -> None:
        self._set_node_state(node, "lost")

    def record_left(self, node: str) -> None:
        self._set_node_state(node, "ended")

    def _set_node_state(self, node: str, node_state: str) -> None:
        nodes = self._state.nodes
        if node in nodes:
            self.update(nodes=nodes | {node: _replace(nodes[node], state=node_state)})

    def end_epoch(self, decision: Decision) -> None:
        outcome = "restart" if decision.again else decision.state
        self._change_last_epoch(
            ended_at=self._clock(),
            outcome=outcome,
            counted=decision.counted,
            cause=decision.cause,
        )
        if decision.again:
            self._set_node_states("joined")
            self.update(
                state="restarting",
                reason=decision.reason,
                restarts=decision.budget.used,
                restarts_by_cause=dict(decision.budget.by_cause),
            )

    def end_final_checkpoint(self, outcome: str) -> None:
        """Ends an epoch that only saved a checkpoint; it is not a fault."""
        self._change_last_epoch(ended_at=self._clock(), outcome=outcome)
        self.update()

    def finish(self, decision: Decision) -> None:
        """Writes the report and then the final state, whose readers look for the report."""
        assert decision.state != "restarting"
        self._set_node_states("ended")
        self._discovery.withdraw()
        ended = finish(
            self._state,
            decision.state,
            decision.code,
            decision.reason,
            decision.cause,
            at=self._clock(),
        )
        with contextlib.suppress(*RECORD_ERRORS):  # the report is optional, the final state is not
            write_report(self._folder, self._plan, ended)
        self._state = ended
        self.update()

    def _set_node_states(self, state: str) -> None:
        """Sets the state of all nodes that are still in the run; spares do not run."""

        def with_state(node: NodeState) -> NodeState:
            has_left = node.state in ("lost", "ended")
            is_idle = state == "running" and not node.ranks
            return node if has_left or is_idle else _replace(node, state=state)

        nodes = {name: with_state(node) for name, node in self._state.nodes.items()}
        self._state = _replace(self._state, nodes=nodes)

    def _change_last_epoch(self, **changes: object) -> None:
        *earlier, last = self._state.epochs
        self._state = _replace(self._state, epochs=[*earlier, _replace(last, **changes)])
