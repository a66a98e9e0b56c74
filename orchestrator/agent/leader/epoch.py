"""One epoch: one attempt of the workers, from its number on disk to the end of the last worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import assert_never

from msgspec import structs

from orchestrator.agent.faults import policy
from orchestrator.agent.faults.detector import HangDetector
from orchestrator.agent.faults.diagnosis import Diagnosis
from orchestrator.agent.protocol import messages
from orchestrator.plan import Exit, Plan
from orchestrator.run.epoch_lease import LeaseLost
from orchestrator.run.request import used_nodes
from orchestrator.run.state import Cause

from .context import Context, Event
from .elasticity import Elasticity
from .membership import Member, MemberLost, MemberUnfit
from .world_sizes import reported_step

_FAILURE_GRACE_S = 3.0  # for the peers of a failed worker: they can no longer save together
_LOSS_GRACE_S = 1.5  # after a lost node of an elastic run: workers detect a dead peer themselves
_UNKILLABLE_S = 30.0  # after SIGKILL; a process that survives that long hangs in the kernel


class Epoch:
    """Runs one epoch: assigns the ranks, handles events, and stops the workers."""

    def __init__(self, context: Context, detector: HangDetector, elasticity: Elasticity):
        self._context = context
        self._detector = detector
        self._elasticity = elasticity
        self._rules = context.rules
        self._ranked_nodes = context.ranked_nodes
        self._ranked_set = set(context.ranked_nodes)
        self._failure_grace = min(_FAILURE_GRACE_S, self._rules.grace_s)
        loss_grace_s = _LOSS_GRACE_S if context.elastic else _FAILURE_GRACE_S
        self._loss_grace = min(loss_grace_s, self._rules.grace_s)
        self._started: set[str] = set()
        self._stopped: set[str] = set()
        self._ends: list[policy.WorkerEnd] = []
        self._lost: list[policy.NodeLoss] = []
        self._stopping = False
        self._deadline: float | None = None  # loop time at which even killed workers must be gone
        #: Reason for which the workers save and stop, if the run continues with other nodes.
        self._resize_reason = ""
        self._straggler: Cause | None = None  # the slow node that a resize replaces
        self._fault: Cause | None = None  # detected by the coordinator; it ends the epoch

    async def run(self) -> policy.EpochEnd:
        """Runs the epoch; returns its outcome once every worker is gone."""
        context = self._context
        furthest_before = self._context.furthest_step
        await self._begin()
        await self._wait_until_ready()
        if not self._stopping:
            self._assign_ranks()
        while self._nodes_with_workers():
            deadlines = [self._deadline, self._elasticity.scale_up.check_at]
            times = [time for time in deadlines if time is not None]
            event = await context.next_event(min(times, default=None))
            if event is not None:
                self._handle(event)
            else:
                self._on_timeout()
        return policy.EpochEnd(
            epoch=context.epoch,
            world_size=len(context.plan.ranks),
            ends=tuple(self._ends),
            lost=tuple(self._lost),
            request=context.end_request,
            new_steps=context.furthest_step > furthest_before,
            elastic=context.elastic,
            resize=self._resize_reason,
            slow=self._straggler,
            fault=self._fault_with_tail(),
        )

    async def _begin(self) -> None:
        context = self._context
        metrics = self._context.recorder.metrics
        self._detector.begin_epoch(context.plan)
        await context.begin_epoch()
        context.record_event("epoch_began", epoch=context.epoch)
        metrics.set("orch_wanted_nodes", len(self._ranked_nodes))
        metrics.set("orch_healthy_nodes", len(context.members))
        for member in context.members.values():
            member.ready = None
            member.channel.send(context.epoch, messages.Prepare())

    async def _wait_until_ready(self) -> None:
        """Waits until all ranked nodes have answered Prepare, or the epoch has to stop."""
        context = self._context
        deadline = asyncio.get_running_loop().time() + self._rules.join_timeout_s
        while not self._stopping:
            members = self._ranked_members()
            unready = [node for node, member in members if member.ready is None]
            if not unready:
                return
            event = await context.next_event(deadline)
            if event is None:
                loss = MemberLost("no answer to a new epoch")
                event = Event(context.epoch, unready[0], loss)
            self._handle(event)

    def _assign_ranks(self) -> None:
        context = self._context
        first = context.members[context.plan.ranks[0].node]
        members = context.members.values()
        for index, node in enumerate(self._ranked_nodes):
            self._send(node, assignment(context.plan, node, index, first, members))

    def _on_timeout(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            node = self._nodes_with_workers()[0]
            loss = MemberLost("its workers cannot be killed")
            self._handle(Event(self._context.epoch, node, loss))
        else:
            self._consider_scale_up()

    def _ranked_members(self) -> list[tuple[str, Member]]:
        members = self._context.members.items()
        return [(node, member) for node, member in members if node in self._ranked_set]

    def _nodes_with_workers(self) -> list[str]:
        """Returns the nodes whose workers of this epoch may still run.

        A node that was lost and has rejoined has none.
        """
        finished = self._stopped | {loss.node for loss in self._lost}
        return [node for node, _ in self._ranked_members() if node not in finished]

    @property
    def _all_started(self) -> bool:
        return self._started.issuperset(self._ranked_nodes)

    def _send(
        self, node: str, message: messages.Assign | messages.Examine | messages.Prepare
    ) -> None:
        self._context.members[node].channel.send(self._context.epoch, message)

    # ---------------------------------------------------------------------------------- events

    def _handle(self, event: Event) -> None:
        node = event.node
        message = event.message
        member = self._context.members.get(node)
        if isinstance(message, MemberLost):
            return self._on_member_lost(node, member, message)
        if member is None:
            return None  # the message was sent before the member was lost
        match message:
            case messages.Ready():
                member.ready = message
            case messages.Started():
                self._on_started(node)
            case messages.WorkerExit():
                self._on_worker_exit(node, message)
            case messages.Stopped():
                self._stopped.add(node)
            case messages.AgentAlive():
                self._on_heartbeat(node, message)
            case messages.TerminationSignal():
                self._on_termination_signal(node, message)
            case messages.Join():
                self._on_join(node, message)
            case messages.Warm():
                self._consider_scale_up()
            case MemberUnfit() | LeaseLost():
                pass  # occurs only while the first nodes are awaited; is raised by next_event
            case _:
                assert_never(message)
        return None

    def _on_member_lost(self, node: str, member: Member | None, loss: MemberLost) -> None:
        context = self._context
        self._elasticity.partition_suspected |= loss.silent
        if member is None or not loss.concerns(member):
            return
        if node in self._ranked_set:
            self._lost.append(policy.NodeLoss(node, loss.reason))
        context.remove_lost_node(node, loss.reason)
        context.recorder.metrics.set("orch_healthy_nodes", len(context.members))
        if node in self._ranked_set:
            self._stop_all(f"node {node} is lost", self._loss_grace)

    def _on_join(self, node: str, join: messages.Join) -> None:
        """Makes a node that joins while the others run a spare until the next epoch."""
        context = self._context
        self._send(node, messages.Prepare())
        context.state_writer.record_spare(node, join)
        context.record_event("node_joined", on=node)
        context.recorder.metrics.set("orch_healthy_nodes", len(context.members))
        self._consider_scale_up()

    def _on_started(self, node: str) -> None:
        self._started.add(node)
        if self._all_started and not self._stopping:
            context = self._context
            context.state_writer.record_running()
            context.record_event("epoch_runs", epoch=context.epoch, workers=len(context.plan.ranks))
            self._elasticity.on_workers_started()
            self._consider_scale_up()

    def _on_worker_exit(self, node: str, worker_exit: messages.WorkerExit) -> None:
        context = self._context
        if worker_exit.step is not None:
            context.furthest_step = max(context.furthest_step, worker_exit.step)
        exit_fields = structs.asdict(worker_exit) | {"tail": tuple(worker_exit.tail)}
        log_path = context.folder.rank_log(worker_exit.rank).relative_to(context.folder.path)
        worker_end = policy.WorkerEnd(
            node=node, order=len(self._ends), log=str(log_path), **exit_fields
        )
        self._ends.append(worker_end)
        context.record_event(
            "worker_ended",
            rank=worker_exit.rank,
            on=node,
            code=worker_exit.code,
            asked=worker_exit.asked,
            step=worker_exit.step,
        )
        if worker_exit.code != 0:
            cause = self._fault or policy.cause_of(worker_end, context.epoch)
            is_saving = worker_exit.code == Exit.RESTART  # its peers save too, and need the time
            self._stop_all(cause.text, self._rules.grace_s if is_saving else self._failure_grace)

    def _on_termination_signal(self, node: str, signal: messages.TerminationSignal) -> None:
        """Ends the run, or continues an elastic run without that node if enough nodes stay.

        An elastic run also ends if people have requested its end.
        """
        context = self._context
        if not context.elastic or context.end_intent:
            reason = context.request_end(signal).reason
            grace_s = 0.0 if signal.force else self._rules.grace_s
        elif node not in self._ranked_set:
            context.release_node(node, Exit.RESTART, signal.reason)
            return
        else:
            if not self._elasticity.mark_leaving(node, signal.reason):
                context.request_end(signal)
            reason = self._resize_reason or f"a node leaves ({signal.reason})"
            self._resize_reason = reason
            grace_s = self._failure_grace if signal.force else self._rules.grace_s
        self._stop_all(reason, grace_s, signal.signal, force=signal.force)

    # -------------------------------------------------------------------- hangs and stragglers

    def _on_heartbeat(self, node: str, heartbeat: messages.AgentAlive) -> None:
        if self._stopping or self._fault or not self._all_started:
            return
        now = asyncio.get_running_loop().time()
        self._detector.add_report(node, heartbeat.seen, now)
        ended_ranks = [end.rank for end in self._ends]
        if (diagnosis := self._detector.diagnosis(now, ended_ranks)) is not None:
            self._end_for_fault(diagnosis)
        elif (slowdowns := self._detector.new_stragglers()) is not None:
            for slow_node, ratio in slowdowns.items():
                self._context.record_event("straggler", on=slow_node, ratio=ratio)
            self._context.state_writer.record_stragglers(slowdowns)
            for slow_node, member in self._ranked_members():
                member.slowdown = slowdowns.get(slow_node, 1.0)
        self._replace_straggler()

    def _end_for_fault(self, diagnosis: Diagnosis) -> None:
        """Ends the epoch for a fault: saves the workers' stacks and kills the one at fault."""
        context = self._context
        self._fault = diagnosis.cause(context.folder, context.epoch)
        context.record_event(
            "fault_detected",
            cause=diagnosis.kind,
            reason=diagnosis.text,
            on=diagnosis.node,
            rank=diagnosis.rank,
        )
        for node, _ in self._ranked_members():
            ranks_to_kill = []
            if node == diagnosis.node and diagnosis.rank is not None:
                ranks_to_kill.append(diagnosis.rank)
            self._send(node, messages.Examine(reason=diagnosis.text, end=ranks_to_kill))
        if diagnosis.rank is None:
            self._stop_all(diagnosis.text, self._loss_grace)

    def _fault_with_tail(self) -> Cause | None:
        """Returns the fault, with the exit code and last log lines of its worker, or None."""
        fault = self._fault
        if fault is None:
            return None
        for end in self._ends:
            if end.rank == fault.rank:
                return structs.replace(fault, code=end.code, tail=list(end.tail))
        return fault

    def _replace_straggler(self) -> None:
        slowdowns = self._detector.lastingly_slow()
        if not slowdowns or self._rules.on_straggler != "exclude" or self._stopping or self._fault:
            return
        if len(self._elasticity.ready_nodes()) > len(self._ranked_nodes):
            slowest, ratio = max(slowdowns.items(), key=lambda item: item[1])
            self._resize_reason = (
                f"{slowest} is slow: its own compute time is {ratio:g} times the median of its"
                " peers'"
            )
            epoch = self._context.epoch
            step = reported_step(self._context)
            self._straggler = Cause(
                kind="straggler",
                text=self._resize_reason,
                epoch=epoch,
                node=slowest,
                step=step,
            )
            self._stop_all(self._resize_reason, self._rules.grace_s)

    # ------------------------------------------------------------------- the end of the epoch

    def _consider_scale_up(self) -> None:
        if self._stopping or not self._all_started:
            return
        larger = self._elasticity.scale_up.consider(len(self._elasticity.ready_nodes()))
        if larger is not None:
            self._resize_reason = (
                f"growing from {len(self._ranked_nodes)} to {len(used_nodes(larger))} nodes"
            )
            self._stop_all(self._resize_reason, self._rules.grace_s)

    def _stop_all(
        self,
        reason: str,
        grace_s: float,
        signal: str = "SIGTERM",
        force: bool = False,
    ) -> None:
        """Asks every worker to end, once per epoch; with `force` also a second time."""
        context = self._context
        self._elasticity.scale_up.on_stop(first=not self._stopping)
        if self._stopping and not force:
            return
        self._stopping = True
        self._deadline = asyncio.get_running_loop().time() + grace_s + _UNKILLABLE_S
        context.record_event("epoch_stops", epoch=context.epoch, reason=reason)
        state = "stopping" if context.end_request else "restarting"
        context.state_writer.update(state=state, reason=reason)
        stop = messages.Stop(reason=reason, signal=signal, grace_s=grace_s)
        for member in context.members.values():
            member.channel.send(context.epoch, stop)


def assignment(
    plan: Plan,
    node: str,
    index: int,
    first: Member,
    members: Iterable[Member],
) -> messages.Assign:
    """Returns a node's share of the ranks, and the address of rank 0's store.

    `first` is the member of rank 0's node; it receives the addresses of all `members`.
    """
    assert first.ready is not None
    ranks = [rank for rank in plan.ranks if rank.node == node]
    return messages.Assign(
        plan_hash=plan.hash,
        ranks=[messages.RankAssignment(rank.rank, rank.gpu) for rank in ranks],
        node_rank=index,
        world_size=len(plan.ranks),
        master_address=first.join.address,
        master_port=first.ready.port,
        peers=sorted(_addresses(members)) if node == first.join.node else [],
    )


def _addresses(members: Iterable[Member]) -> set[str]:
    """Returns all addresses of the nodes: those they reported, and those seen by this process."""
    addresses: set[str] = set()
    for member in members:
        addresses |= {member.join.address, member.channel.address, *member.join.addresses}
    return addresses - {""}
