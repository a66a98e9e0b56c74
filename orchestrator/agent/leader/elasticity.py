"""Which nodes and which plan the next epoch gets.

A run with fixed nodes has one legal size: it waits for all its nodes and keeps its plan. An elastic
run may lose nodes, be left, joined and rejoined by them: between two epochs it puts the plan in
force that the planner makes for the nodes that are connected, and members without a rank are
spares.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from orchestrator.agent.faults import policy
from orchestrator.agent.protocol.messages import TerminationSignal
from orchestrator.plan import Exit, Plan, load_plan, to_json
from orchestrator.planner.elastic.next_plan import (
    horizon_s,
    larger_plan,
    legal_size,
    next_plan,
    pays,
)
from orchestrator.run.bad_nodes import remembered
from orchestrator.run.epoch_lease import LeaseLost
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import LaunchRequest, used_nodes
from orchestrator.run.state import NodeState

from .context import Context, Event
from .election import PLANNER, TICK_S, TURN_TICKS, Announcement
from .membership import MemberLost, MemberUnfit

_SETTLE_S = 8.0  # for agents to find a coordinator that has moved; one that comes later is a spare
_LOOK_AGAIN_S = 1.0  # until scaling up is considered again


class CoordinatorLeaves(LeaseLost):
    """This node has to leave a run that goes on."""


@dataclass(frozen=True)
class ScaleUpPolicy:
    """When a healthy run stops to continue with more nodes."""

    dwell_s: float = 60.0  # not before its nodes have been the same for this long
    cost_s: float = (
        10.0  # of saving, stopping and starting again, until this run has measured its own
    )


class WorldSizes:
    """The legal sizes of a run: node count -> plan as submitted. `nodes`: those that are started
    with the run."""

    def __init__(
        self,
        nodes: Sequence[str],
        plans: Mapping[int, Plan],
        elastic: bool,
        policy: ScaleUpPolicy = ScaleUpPolicy(),
    ):
        self.nodes = list(nodes)
        self.plans = dict(plans)
        self.elastic = elastic
        self.policy = policy
        self._loading: asyncio.Task | None = None

    @classmethod
    def fixed(cls, plan: Plan) -> WorldSizes:
        """Of a run that has these nodes or none."""
        nodes = used_nodes(plan)
        return cls(nodes, {len(nodes): plan}, elastic=False)

    @classmethod
    def from_request(
        cls, folder: RunFolder, request: LaunchRequest, policy: ScaleUpPolicy
    ) -> WorldSizes:
        """Of an elastic run."""
        plans = {
            node_count: load_plan(folder.sized_plan(node_count)) for node_count in request.sizes
        }
        return cls([agent.node for agent in request.agents], plans, elastic=True, policy=policy)

    @property
    def smallest(self) -> int:
        return min(self.plans)

    async def plan_for(self, current: Plan, healthy: Collection[str]) -> Plan | None:
        """The plan for the healthy nodes, None if they are too few. In a thread, so that heartbeats
        go on."""
        ranked = used_nodes(current)
        if legal_size(self.plans, len(healthy)) == len(ranked) and set(ranked) <= set(healthy):
            return current
        return await asyncio.to_thread(next_plan, current, self.plans, healthy)

    def preload(self) -> None:
        """Imports the planner while the workers run, so that a lost node does not wait for it."""
        if self.elastic and self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(import_module, PLANNER))


class ScaleUp:
    """Decides when a healthy run stops at a step boundary to continue with more nodes."""

    def __init__(self, context: Context, sizes: WorldSizes):
        self._context = context
        self._sizes = sizes
        self._time = asyncio.get_running_loop().time
        self._started_at = self.nodes_changed_at = (
            self._time()
        )  # of this coordinator, of the last change of nodes
        self._stopped_at: float | None = None
        self._cost_s: float | None = (
            None  # of the last restart, from the request to stop to the workers' start
        )
        self.faults = 0
        self.check_at: float | None = None  # loop time at which to consider it again

    def on_stop(self, first: bool) -> None:
        """The workers are told to stop; `first`: in this epoch."""
        self.check_at = None
        if first:
            self._stopped_at = self._time()

    def on_workers_started(self) -> None:
        """All workers have started."""
        if self._stopped_at is not None:
            self._cost_s = self._time() - self._stopped_at

    def consider(self, ready_nodes: int) -> Plan | None:
        """The larger plan that pays, None for none; where there is one, `check_at` is set."""
        context = self._context
        sizes = self._sizes
        self.check_at = None
        larger = larger_plan(context.plan, sizes.plans, ready_nodes)
        if larger is None:
            return None
        now = self._time()
        stable = now - self.nodes_changed_at
        furthest_step = max(context.furthest_step, reported_step(context))
        left_s = (context.plan.job.train.steps - furthest_step) * context.plan.time.step_s
        if (
            context.plan.program
        ):  # nobody knows its end: a program that has run for an hour is given another one
            left_s = now - self._started_at
        horizon = horizon_s(left_s, now - self._started_at, self.faults, stable)
        cost_s = sizes.policy.cost_s if self._cost_s is None else self._cost_s
        times = {
            "stable_s": stable,
            "dwell_s": sizes.policy.dwell_s,
            "horizon_s": horizon,
            "cost_s": cost_s,
        }
        if not pays(context.plan, larger, **times):
            self.check_at = now + max(_LOOK_AGAIN_S, sizes.policy.dwell_s - stable)
            return None
        nodes = len(used_nodes(larger))
        context.record_event(
            "growing", nodes=nodes, horizon_s=round(horizon, 1), cost_s=self._cost_s
        )
        return larger


class Elasticity:
    def __init__(self, context: Context, sizes: WorldSizes, announcement: Announcement):
        self._context = context
        self._sizes = sizes
        self._announcement = announcement
        self.scale_up = ScaleUp(context, sizes)
        self._leaving: dict[str, str] = {}  # node -> why it will leave
        #: A node was lost that may live: perhaps this one is cut off, or was paused.
        self.partition_suspected = False

    # ---------------------------------------------------------------------------------- before the
    #     first epoch

    async def wait_for_nodes(self) -> policy.Decision | None:
        """Waits for the nodes of the first epoch. None when they are here, else the decision that
        ends the run.

        After the coordinator has moved it does not wait for nodes that are gone.
        """
        context = self._context
        members = self._context.members
        smallest = self._sizes.smallest
        recorded_nodes = context.state_writer.nodes if context.elastic else {}
        moved = bool(recorded_nodes)
        awaited = self._nodes_to_await(recorded_nodes)
        join_s = context.rules.join_timeout_s
        now = asyncio.get_running_loop().time()
        join_deadline = now + (
            min(max(_SETTLE_S, context.rules.heartbeat_timeout_s), join_s) if moved else join_s
        )
        deadline = min(join_deadline, now + _SETTLE_S) if moved else join_deadline
        # nodes that another coordinator had lost are waited for only if the run would end without
        # them
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
        context.membership.forming = False
        if not context.elastic:
            context.state_writer.record_joined(
                {node: members[node].join for node in context.ranked_nodes}
            )
            context.record_event("nodes_joined", nodes=len(members))
            return None
        if not moved:
            for member in members.values():
                member.warm = (
                    True  # all import at once: none is worth waiting for less than the others
                )
        for node in recorded_nodes.keys() & awaited - members.keys():
            context.state_writer.record_lost(node)
        context.record_event("nodes_joined", nodes=len(members), coordinator_moved=moved)
        decision = await self._adopt_next_plan(
            policy.Decision(True, "restarting", "", context.budget)
        )
        return None if decision.again else decision

    def _nodes_to_await(self, recorded_nodes: Mapping[str, NodeState]) -> set[str]:
        """Nodes that may still come. `known`: what the state says of nodes, empty at the beginning
        of a run."""
        context = self._context
        if not context.elastic:
            return set(self._sizes.nodes)
        ended_nodes = {
            node for node, state in recorded_nodes.items() if state.state in ("lost", "ended")
        }
        if recorded_nodes:
            ended_nodes |= context.state_writer.take_over()
            last_epoch = (
                context.state_writer.last_epoch
            )  # the end that the last coordinator could not note
            if last_epoch and last_epoch.cause and last_epoch.cause.kind == "coordinator_lost":
                decision = policy.Decision(
                    True,
                    "restarting",
                    last_epoch.cause.text,
                    context.budget,
                    cause=last_epoch.cause,
                )
                context.record_epoch_end(decision, last_epoch.epoch)
        self._exclude_remembered()
        return {
            *self._sizes.nodes,
            *recorded_nodes,
        } - ended_nodes - context.membership.excluded.keys() | {context.node}

    def _exclude_remembered(self) -> None:
        """Excludes the nodes that the user's node memory calls bad, if enough others are left."""
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
        self, event: Event, awaited: set[str], moved: bool
    ) -> policy.Decision | None:
        context, (_, node, message) = self._context, event
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

    # ---------------------------------------------------------------------------------- during an
    #     epoch

    def ready_nodes(self) -> list[str]:
        """Members whose workers would start at once. If those are too few, all of them."""
        warm = [node for node, member in self._context.members.items() if member.warm]
        return warm if len(warm) >= self._sizes.smallest else list(self._context.members)

    def mark_leaving(self, node: str, reason: str) -> bool:
        """Notes that a node with ranks will leave after this epoch. False: too few will stay, the
        run must end."""
        self._leaving[node] = reason
        staying = self._context.members.keys() - self._leaving.keys()
        return not (
            set(self._context.ranked_nodes) <= self._leaving.keys()
            and len(staying) < self._sizes.smallest
        )

    def on_workers_started(self) -> None:
        """All workers of the epoch have started."""
        self.partition_suspected = False
        self.scale_up.on_workers_started()
        self._sizes.preload()

    # ---------------------------------------------------------------------------------- between
    #     epochs

    async def next_plan(self, decision: policy.Decision) -> policy.Decision:
        """The decision, with the next epoch's plan in force, or the one that ends the run for want
        of nodes.

        Raises CoordinatorLeaves if this node has to leave.
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
        """Claims the next epoch and puts its plan in force, or ends the run. `left`: nodes were
        told to leave."""
        context = self._context
        healthy = len(context.members)
        plan = await self._sizes.plan_for(context.plan, self.ready_nodes())
        if plan is None and self.partition_suspected:
            plan = await self._offer_leadership()
        if plan is None and not nodes_left:
            plan = await self._wait_for_capacity()
        if plan is None:
            return self._end_for_lack_of_nodes(decision, nodes_left)
        await context.retry_on_disk_errors(context.state_writer.lease_next_epoch)
        await context.retry_on_disk_errors(
            self._announcement.renew
        )  # with the new claim: agents go only where the newest one is
        if plan.hash != context.plan.hash:  # all who read the last one are gone
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
            False, state, reason, context.budget, int(code), cause=decision.cause
        )

    async def _offer_leadership(self) -> Plan | None:
        """Too few nodes are connected, but others may live behind a partition: lets them claim the
        run.

        Raises LeaseLost if one of them has. Else the plan for the nodes that have come back, None
        if they are too few.
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
        self._announcement.paused = self.partition_suspected = False
        return await self._sizes.plan_for(context.plan, self.ready_nodes())

    async def _wait_for_capacity(self) -> Plan | None:
        """Waits up to `min_nodes_grace_s` for nodes that may be on their way back, with the state
        in memory.

        None if they do not come, or somebody asks for the end.
        """
        context = self._context
        loop = asyncio.get_running_loop()
        grace_s = context.rules.min_nodes_grace_s
        smallest = self._sizes.smallest
        if (
            not grace_s or not context.state_writer.nodes
        ):  # at the beginning all have been waited for
            return None
        deadline = loop.time() + grace_s
        context.record_event(
            "awaits_nodes", nodes=len(context.members), least=smallest, seconds=grace_s
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
            elif isinstance(message, MemberLost) and message.member in (
                None,
                context.members.get(node),
            ):
                context.remove_lost_node(node, message.reason)
        return await self._sizes.plan_for(context.plan, self.ready_nodes())

    def _record_plan_change(self, old_plan: Plan, plan: Plan, reason: str) -> None:
        nodes = used_nodes(plan)
        old_nodes = used_nodes(old_plan)
        kind = (
            "grow"
            if len(nodes) > len(old_nodes)
            else "shrink"
            if len(nodes) < len(old_nodes)
            else "swap"
        )
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


def reported_step(context: Context) -> int:
    """The furthest step that any worker of the members has reported, 0 for none."""
    return max(
        (member.step for member in context.members.values() if member.step is not None), default=0
    )


def _shorten_list(nodes: list[str]) -> str:
    first_nodes = ", ".join(nodes[:8])
    return first_nodes + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
