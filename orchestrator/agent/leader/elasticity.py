"""Chooses the nodes and the plan of the next epoch.

A run with fixed nodes has one legal size: it waits for all its nodes and keeps its plan. An elastic
run may lose nodes, and nodes may leave, join and rejoin it: between two epochs it adopts the plan
that the planner makes for the connected nodes. Members without a rank are spares.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping

from orchestrator.agent.faults import policy
from orchestrator.agent.protocol.messages import TerminationSignal
from orchestrator.plan import Exit, Plan, to_json
from orchestrator.run.bad_nodes import remembered
from orchestrator.run.epoch_lease import LeaseLost
from orchestrator.run.folder import write_private
from orchestrator.run.request import used_nodes
from orchestrator.run.state import NodeState

from .context import Context, Event
from .election import TICK_S, TURN_TICKS, Announcement
from .membership import MemberLost, MemberUnfit
from .world_sizes import ScaleUp, WorldSizes

#: Seconds for agents to find a coordinator that has moved; a node that joins later is a spare.
_SETTLE_S = 8.0


class CoordinatorLeaves(LeaseLost):
    """This node has to leave a run that continues without it."""


class Elasticity:
    """Chooses the nodes and plans of one run's epochs. See the module."""

    def __init__(self, context: Context, sizes: WorldSizes, announcement: Announcement):
        self._context = context
        self._sizes = sizes
        self._announcement = announcement
        self.scale_up = ScaleUp(context, sizes)
        self._leaving: dict[str, str] = {}  # node -> reason for which it will leave
        #: A lost node may be alive: perhaps this node is cut off, or was paused.
        self.partition_suspected = False

    # ------------------------------------------------------------------ before the first epoch

    async def wait_for_nodes(self) -> policy.Decision | None:
        """Waits for the nodes of the first epoch; returns None, or the decision that ends the run.

        After the coordinator has moved, nodes that are gone are not awaited.
        """
        context = self._context
        members = context.members
        recorded_nodes = context.state_writer.nodes if context.elastic else {}
        moved = bool(recorded_nodes)
        awaited = self._nodes_to_await(recorded_nodes)
        if decision := await self._await_nodes(awaited, moved):
            return decision
        context.membership.forming = False
        if not context.elastic:
            joins = {node: members[node].join for node in context.ranked_nodes}
            context.state_writer.record_joined(joins)
            context.record_event("nodes_joined", nodes=len(members))
            return None
        if not moved:
            # All nodes import their program at the same time: prefer none of them.
            for member in members.values():
                member.warm = True
        for node in recorded_nodes.keys() & awaited - members.keys():
            context.state_writer.record_lost(node)
        context.record_event("nodes_joined", nodes=len(members), coordinator_moved=moved)
        decision = await self._adopt_next_plan(policy.restart("", context.budget))
        return None if decision.again else decision

    async def _await_nodes(self, awaited: set[str], moved: bool) -> policy.Decision | None:
        """Waits until the awaited nodes have joined, or enough of them when the time is over.

        Returns the decision that ends the run, or None.
        """
        context = self._context
        members = context.members
        smallest = self._sizes.smallest
        join_s = context.rules.join_timeout_s
        now = asyncio.get_running_loop().time()
        deadline = join_deadline = now + join_s
        if moved:
            # Nodes that the last coordinator had lost are awaited for the whole time only if the
            # run would end without them.
            settle_s = max(_SETTLE_S, context.rules.heartbeat_timeout_s)
            join_deadline = now + min(settle_s, join_s)
            deadline = min(join_deadline, now + _SETTLE_S)
        while not awaited <= members.keys() or len(members) < smallest:
            event = await context.next_event(deadline)
            if event is not None:
                if decision := self._handle_while_waiting(event, awaited, moved):
                    return decision
            elif not context.elastic:
                missing = [node for node in context.ranked_nodes if node not in members]
                reason = f"{_shorten_list(missing)} did not join within {join_s:g} s"
                return context.end_run("failed", Exit.CAPACITY, reason, "join_timeout")
            elif deadline == join_deadline or len(members) >= smallest:
                break
            else:
                deadline = join_deadline
        return None

    def _nodes_to_await(self, recorded_nodes: Mapping[str, NodeState]) -> set[str]:
        """Returns the nodes that may still join.

        `recorded_nodes` are those in the run's state; there are none when a run begins.
        """
        context = self._context
        if not context.elastic:
            return set(self._sizes.nodes)
        ended_nodes = {
            node for node, state in recorded_nodes.items() if state.state in ("lost", "ended")
        }
        if recorded_nodes:
            ended_nodes |= context.state_writer.take_over()
            self._record_end_of_last_coordinator()
        self._exclude_remembered()
        candidates = {*self._sizes.nodes, *recorded_nodes}
        return candidates - ended_nodes - context.membership.excluded.keys() | {context.node}

    def _record_end_of_last_coordinator(self) -> None:
        """Records the end of the epoch in which the last coordinator was lost."""
        last_epoch = self._context.state_writer.last_epoch
        cause = last_epoch.cause if last_epoch else None
        if last_epoch and cause and cause.kind == "coordinator_lost":
            decision = policy.restart(cause.text, self._context.budget, cause)
            self._context.record_epoch_end(decision, last_epoch.epoch)

    def _exclude_remembered(self) -> None:
        """Excludes the nodes that the user's earlier runs recorded as bad, if enough are left."""
        context = self._context
        bad_nodes = {
            node: reason
            for node, reason in remembered(context.folder, time.time()).items()
            if node != context.node
        }
        if not bad_nodes:
            return
        if len(set(self._sizes.nodes) - bad_nodes.keys()) < self._sizes.smallest:
            context.record_event(
                "bad_nodes_used",
                nodes=sorted(bad_nodes),
                reason="too few would be left without them",
            )
            return
        context.membership.excluded.update(bad_nodes)
        for node, reason in bad_nodes.items():
            context.release_node(node, Exit.NODE, reason)
            context.record_event("node_left_out", on=node, reason=reason)

    def _handle_while_waiting(
        self,
        event: Event,
        awaited: set[str],
        moved: bool,
    ) -> policy.Decision | None:
        """Handles an event while nodes are awaited.

        Returns the decision that ends the run, or None.
        """
        context = self._context
        node = event.node
        message = event.message
        match message:
            case MemberLost(reason=reason) if not context.elastic:
                return context.end_run(
                    "failed", Exit.CAPACITY, f"{node}: {reason}", "node_lost", node
                )
            case MemberUnfit(code=code, reason=reason) if not context.elastic:
                return context.end_run("failed", code, reason, "node_unfit", node)
            case MemberLost(reason=reason) | MemberUnfit(reason=reason):
                awaited.discard(node)
                if isinstance(message, MemberLost):
                    context.membership.remove(node, "node_lost", reason)
                context.record_event("not_awaited", on=node, reason=reason)
            case TerminationSignal() if moved and node != context.node and not context.end_intent:
                awaited.discard(node)
                context.release_node(node, Exit.RESTART, message.reason)
            case TerminationSignal():
                return context.end_before_start(message)
        return None

    # ------------------------------------------------------------------------ during an epoch

    def ready_nodes(self) -> list[str]:
        """Returns the members whose workers would start at once, or all if those are too few."""
        warm = [node for node, member in self._context.members.items() if member.warm]
        return warm if len(warm) >= self._sizes.smallest else list(self._context.members)

    def mark_leaving(self, node: str, reason: str) -> bool:
        """Marks a node with ranks as leaving after this epoch.

        Returns False if too few nodes would stay, so that the run must end.
        """
        self._leaving[node] = reason
        staying = self._context.members.keys() - self._leaving.keys()
        all_leave = set(self._context.ranked_nodes) <= self._leaving.keys()
        return not (all_leave and len(staying) < self._sizes.smallest)

    def on_workers_started(self) -> None:
        """Handles the start of the epoch's last worker."""
        self.partition_suspected = False
        self.scale_up.on_workers_started()
        self._sizes.preload()

    # ------------------------------------------------------------------------- between epochs

    async def next_plan(self, decision: policy.Decision) -> policy.Decision:
        """Puts the next epoch's plan in force; returns the decision, or one that ends the run.

        The run ends if there are too few nodes. Raises CoordinatorLeaves if this node has to leave.
        """
        context = self._context
        if not decision.again or not context.elastic:
            return decision
        leaving = self._leaving
        self._leaving = {}
        for node, reason in leaving.items():
            context.release_node(node, Exit.RESTART, reason)
        if decision.exclude:
            context.release_node(decision.exclude, Exit.NODE, decision.reason)
        if context.node in (*leaving, decision.exclude):
            context.state_writer.end_epoch(decision)
            context.record_epoch_end(decision)
            raise CoordinatorLeaves("this node leaves; another one will coordinate")
        if decision.cause:
            self.scale_up.faults += 1
        return await self._adopt_next_plan(decision, bool(leaving))

    async def _adopt_next_plan(
        self, decision: policy.Decision, nodes_left: bool = False
    ) -> policy.Decision:
        """Takes the lease on the next epoch and puts its plan in force, or ends the run.

        `nodes_left` is set if nodes were sent away.
        """
        context = self._context
        healthy = len(context.members)
        plan = await self._sizes.plan_for(context.plan, self.ready_nodes())
        if plan is None and self.partition_suspected:
            plan = await self._yield_leadership()
        if plan is None and not nodes_left:
            plan = await self._wait_for_capacity()
        if plan is None:
            return self._end_for_lack_of_nodes(decision, nodes_left)
        await context.retry_on_disk_errors(context.state_writer.lease_next_epoch)
        # Announces the new lease: agents connect only to the holder of the newest one.
        await context.retry_on_disk_errors(self._announcement.renew)
        if plan.hash != context.plan.hash:  # all readers of the old plan have ended
            document = to_json(plan, indent=1) + b"\n"
            await context.retry_on_disk_errors(lambda: write_private(context.folder.plan, document))
            context.state_writer.record_plan(plan)
            self._record_plan_change(context.plan, plan, decision.reason)
            context.set_plan(plan)
        context.state_writer.record_joined(
            {node: member.join for node, member in context.members.items()}
        )
        context.recorder.metrics.set("orch_spare_nodes", healthy - len(context.ranked_nodes))
        return decision

    def _end_for_lack_of_nodes(
        self, decision: policy.Decision, nodes_left: bool
    ) -> policy.Decision:
        context = self._context
        shortage = (
            f"{len(context.members)} nodes are left, the smallest size of this run is"
            f" {self._sizes.smallest}"
        )
        reason = "; ".join(filter(None, (decision.reason, shortage)))
        state: policy.FinalState = "stopped" if nodes_left else "failed"
        code = Exit.RESTART if nodes_left else Exit.CAPACITY
        if request := context.end_request:
            state = request.kind
            code = Exit.RESTART
            reason = f"{request.reason}; {reason}"
        return policy.Decision(
            again=False,
            state=state,
            reason=reason,
            budget=context.budget,
            code=int(code),
            cause=decision.cause,
        )

    async def _yield_leadership(self) -> Plan | None:
        """Lets other nodes take the lease, since nodes beyond a network partition may be alive.

        Raises LeaseLost if one of them takes it. Otherwise returns the plan for the nodes that are
        connected by then, or None if they are too few.
        """
        context = self._context
        loop = asyncio.get_running_loop()
        context.record_event("stepped_back", nodes=len(context.members))
        self._announcement.paused = True
        turns_s = len(self._sizes.nodes) * TURN_TICKS * TICK_S
        deadline = loop.time() + max(2.0, context.rules.heartbeat_timeout_s) + turns_s + _SETTLE_S
        while loop.time() < deadline:
            await asyncio.sleep(TICK_S)
            with contextlib.suppress(OSError):
                context.state_writer.check_lease()
            if len(context.members) >= self._sizes.smallest:
                break
        self._announcement.paused = False
        self.partition_suspected = False
        return await self._sizes.plan_for(context.plan, self.ready_nodes())

    async def _wait_for_capacity(self) -> Plan | None:
        """Waits up to `min_nodes_grace_s` for lost nodes to rejoin, while the state stays in
        memory.

        Returns None if too few rejoin, or if the end of the run is requested.
        """
        context = self._context
        loop = asyncio.get_running_loop()
        grace_s = context.rules.min_nodes_grace_s
        smallest = self._sizes.smallest
        if not grace_s or not context.state_writer.nodes:  # the first nodes were awaited already
            return None
        deadline = loop.time() + grace_s
        context.record_event(
            "awaits_nodes",
            nodes=len(context.members),
            least=smallest,
            seconds=grace_s,
        )
        context.state_writer.update(
            state="restarting",
            reason=f"waiting up to {grace_s:g} s for {smallest} nodes to be there",
        )
        while len(context.members) < smallest:
            event = await context.next_event(deadline)
            if event is None:
                return None
            node = event.node
            message = event.message
            if isinstance(message, TerminationSignal):
                if node == context.node or context.end_intent:
                    context.request_end(message)
                    return None
                context.release_node(node, Exit.RESTART, message.reason)
            elif isinstance(message, MemberLost) and message.concerns(context.members.get(node)):
                context.remove_lost_node(node, message.reason)
        return await self._sizes.plan_for(context.plan, self.ready_nodes())

    def _record_plan_change(self, old_plan: Plan, plan: Plan, reason: str) -> None:
        nodes = used_nodes(plan)
        old_nodes = used_nodes(old_plan)
        kind = "swap"
        if len(nodes) > len(old_nodes):
            kind = "grow"
        elif len(nodes) < len(old_nodes):
            kind = "shrink"
        self._context.recorder.metrics.add("orch_replans", 1, kind)
        parallel = plan.parallel
        names = ("pp", "dp", "micro_batch_size", "micro_batches")
        degrees = {name: getattr(parallel, name) for name in names}
        if parallel.replica_micro_batches:
            degrees["replica_micro_batches"] = parallel.replica_micro_batches
        self._context.record_event(
            "replanned", how=kind, nodes=nodes, plan=plan.hash, **degrees, reason=reason
        )
        self.scale_up.nodes_changed_at = asyncio.get_running_loop().time()


def _shorten_list(nodes: list[str]) -> str:
    first_nodes = ", ".join(nodes[:8])
    return first_nodes + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
