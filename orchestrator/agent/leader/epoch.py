"""One epoch: one attempt of the workers, from the number on disk to the end of the last worker."""

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
from .elasticity import Elasticity, reported_step
from .membership import Member, MemberLost, MemberUnfit

_FAILURE_GRACE_S = 3.0  # for the peers of a failed worker: they can no longer save together
_LOSS_GRACE_S = 1.5  # in elastic runs, after a lost node: workers notice a dead peer by themselves
_UNKILLABLE_S = 30.0  # after SIGKILL; a process that is still there hangs in the kernel


class Epoch:
    def __init__(self, context: Context, detector: HangDetector, elasticity: Elasticity):
        self._context = context
        self._detector = detector
        self._elasticity = elasticity
        self._rules = context.rules
        self._nodes = context.ranked_nodes
        self._ranked = set(context.ranked_nodes)
        self._failure_grace = min(_FAILURE_GRACE_S, self._rules.grace_s)
        self._loss_grace = min(
            _LOSS_GRACE_S if context.elastic else _FAILURE_GRACE_S, self._rules.grace_s
        )
        self._started: set[str] = set()
        self._stopped: set[str] = set()
        self._ends: list[policy.WorkerEnd] = []
        self._lost: list[policy.NodeLoss] = []
        self._stopping = False
        self._deadline: float | None = None  # loop time at which even killed workers must be gone
        self._resize_reason = (  # why all were asked to save and stop, if the run goes on with other nodes
            ""
        )
        self._straggler: Cause | None = None  # of a resize: the node to be replaced
        self._fault: Cause | None = None  # found by the detector; the workers are ended for it

    async def run(self) -> policy.EpochEnd:
        """Runs the epoch; returns what is known once every worker is gone."""
        context = self._context
        furthest_before = self._context.furthest_step
        await self._begin()
        ready_deadline = asyncio.get_running_loop().time() + self._rules.join_timeout_s
        while (
            unready := [node for node, member in self._ranked_members() if member.ready is None]
        ) and (not self._stopping):
            event = await context.next_event(ready_deadline)
            self._handle(
                event or Event(context.epoch, unready[0], MemberLost("no answer to a new epoch"))
            )
        if not self._stopping:
            first = context.members[context.plan.ranks[0].node]
            for index, node in enumerate(self._nodes):
                self._send(
                    node, assignment(context.plan, node, index, first, context.members.values())
                )
        while self._nodes_with_workers():
            deadlines = [
                time
                for time in (self._deadline, self._elasticity.scale_up.check_at)
                if time is not None
            ]
            event = await context.next_event(min(deadlines, default=None))
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
        metrics.set("orch_wanted_nodes", len(self._nodes))
        metrics.set("orch_healthy_nodes", len(context.members))
        for member in context.members.values():
            member.ready = None
            member.channel.send(context.epoch, messages.Prepare())

    def _on_timeout(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            self._handle(
                Event(
                    self._context.epoch,
                    self._nodes_with_workers()[0],
                    MemberLost("its workers cannot be killed"),
                )
            )
        else:
            self._consider_scale_up()

    def _ranked_members(self) -> list[tuple[str, Member]]:
        return [
            (node, member) for node, member in self._context.members.items() if node in self._ranked
        ]

    def _nodes_with_workers(self) -> list[str]:
        """Nodes whose workers of this epoch may still run. One that was lost and has rejoined has
        none."""
        finished = self._stopped | {loss.node for loss in self._lost}
        return [node for node, _ in self._ranked_members() if node not in finished]

    @property
    def _all_started(self) -> bool:
        return self._started.issuperset(self._nodes)

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
            return None  # sent before it was lost
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
            case (
                MemberUnfit() | LeaseLost()
            ):  # only while the first nodes are awaited; raised by next_event
                pass
            case _:
                assert_never(message)
        return None

    def _on_member_lost(self, node: str, member: Member | None, loss: MemberLost) -> None:
        context = self._context
        self._elasticity.partition_suspected |= loss.silent
        if member is None or loss.member not in (None, member):
            return
        if node in self._ranked:
            self._lost.append(policy.NodeLoss(node, loss.reason))
        context.remove_lost_node(node, loss.reason)
        context.recorder.metrics.set("orch_healthy_nodes", len(context.members))
        if node in self._ranked:
            self._stop_all(f"node {node} is lost", self._loss_grace)

    def _on_join(self, node: str, join: messages.Join) -> None:
        """A node has joined while the others run: a spare until the next epoch."""
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
        context.furthest_step = max(
            context.furthest_step, -1 if worker_exit.step is None else worker_exit.step
        )
        exit_fields = structs.asdict(worker_exit) | {"tail": tuple(worker_exit.tail)}
        log_path = str(context.folder.rank_log(worker_exit.rank).relative_to(context.folder.path))
        self._ends.append(
            policy.WorkerEnd(node=node, order=len(self._ends), log=log_path, **exit_fields)
        )
        context.record_event(
            "worker_ended",
            rank=worker_exit.rank,
            on=node,
            code=worker_exit.code,
            asked=worker_exit.asked,
            step=worker_exit.step,
        )
        if worker_exit.code != 0:
            reason = (
                self._fault.text
                if self._fault
                else policy.cause_of(self._ends[-1], context.epoch).text
            )
            save_in_progress = (
                worker_exit.code == Exit.RESTART
            )  # its peers are saving too: let them
            self._stop_all(reason, self._rules.grace_s if save_in_progress else self._failure_grace)

    def _on_termination_signal(self, node: str, signal: messages.TerminationSignal) -> None:
        """Ends the run; in an elastic run of which nobody asked it, it goes on without that node,
        if enough stay."""
        context = self._context
        if not context.elastic or context.end_intent:
            reason = context.request_end(signal).reason
            grace_s = 0.0 if signal.force else self._rules.grace_s
        elif node not in self._ranked:
            context.release_node(node, Exit.RESTART, signal.reason)
            return
        else:
            if not self._elasticity.mark_leaving(node, signal.reason):
                context.request_end(signal)
            self._resize_reason = reason = self._resize_reason or f"a node leaves ({signal.reason})"
            grace_s = self._failure_grace if signal.force else self._rules.grace_s
        self._stop_all(reason, grace_s, signal.signal, force=signal.force)

    # ---------------------------------------------------------------------------------- hangs and
    #     stragglers

    def _on_heartbeat(self, node: str, heartbeat: messages.AgentAlive) -> None:
        if self._stopping or self._fault or not self._all_started:
            return
        now = asyncio.get_running_loop().time()
        self._detector.add_report(node, heartbeat.seen, now)
        if (diagnosis := self._detector.diagnosis(now)) is not None:
            self._end_for_fault(diagnosis)
        elif (slowdowns := self._detector.new_stragglers()) is not None:
            for slow_node, ratio in slowdowns.items():
                self._context.record_event("straggler", on=slow_node, ratio=ratio)
            self._context.state_writer.record_stragglers(slowdowns)
            for slow_node, member in self._ranked_members():
                member.slowdown = slowdowns.get(slow_node, 1.0)
        self._replace_straggler()

    def _end_for_fault(self, diagnosis: Diagnosis) -> None:
        """Ends the epoch for a fault: all workers' stacks are saved, and the one at fault is
        killed."""
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
            ranks_to_kill = (
                [diagnosis.rank] if node == diagnosis.node and diagnosis.rank is not None else []
            )
            self._send(node, messages.Examine(reason=diagnosis.text, end=ranks_to_kill))
        if diagnosis.rank is None:
            self._stop_all(diagnosis.text, self._loss_grace)

    def _fault_with_tail(self) -> Cause | None:
        """The fault, with the exit code and last log lines of its worker."""
        fault = self._fault
        end = next((end for end in self._ends if fault and end.rank == fault.rank), None)
        return (
            structs.replace(fault, code=end.code, tail=list(end.tail)) if fault and end else fault
        )

    def _replace_straggler(self) -> None:
        slowdowns = self._detector.lastingly_slow()
        if not slowdowns or self._rules.on_straggler != "exclude" or self._stopping or self._fault:
            return
        if len(self._elasticity.ready_nodes()) > len(self._nodes):
            slowest, ratio = max(slowdowns.items(), key=lambda item: item[1])
            self._resize_reason = (
                f"{slowest} is slow: its own compute time is {ratio:g} times the median of its"
                " peers'"
            )
            epoch = self._context.epoch
            step = reported_step(self._context)
            self._straggler = Cause(
                kind="straggler", text=self._resize_reason, epoch=epoch, node=slowest, step=step
            )
            self._stop_all(self._resize_reason, self._rules.grace_s)

    # ---------------------------------------------------------------------------------- the end of
    #     the epoch

    def _consider_scale_up(self) -> None:
        if self._stopping or not self._all_started:
            return
        larger = self._elasticity.scale_up.consider(len(self._elasticity.ready_nodes()))
        if larger is not None:
            self._resize_reason = (
                f"growing from {len(self._nodes)} to {len(used_nodes(larger))} nodes"
            )
            self._stop_all(self._resize_reason, self._rules.grace_s)

    def _stop_all(
        self, reason: str, grace_s: float, signal: str = "SIGTERM", force: bool = False
    ) -> None:
        """Asks every worker to end, once; `force` asks again."""
        context = self._context
        self._elasticity.scale_up.on_stop(first=not self._stopping)
        if self._stopping and not force:
            return
        self._stopping = True
        self._deadline = asyncio.get_running_loop().time() + grace_s + _UNKILLABLE_S
        context.record_event("epoch_stops", epoch=context.epoch, reason=reason)
        context.state_writer.update(
            state="stopping" if context.end_request else "restarting", reason=reason
        )
        for member in context.members.values():
            member.channel.send(
                context.epoch, messages.Stop(reason=reason, signal=signal, grace_s=grace_s)
            )


def assignment(
    plan: Plan, node: str, index: int, first: Member, members: Iterable[Member]
) -> messages.Assign:
    """A node's share of the ranks, and where rank 0's store listens. `first`: the member of rank
    0's node, which is told the addresses of all `members`."""
    assert first.ready is not None
    return messages.Assign(
        plan_hash=plan.hash,
        ranks=[
            messages.RankAssignment(rank.rank, rank.gpu) for rank in plan.ranks if rank.node == node
        ],
        node_rank=index,
        world_size=len(plan.ranks),
        master_address=first.join.address,
        master_port=first.ready.port,
        peers=sorted(_addresses(members)) if node == first.join.node else [],
    )


def _addresses(members: Iterable[Member]) -> set[str]:
    """All addresses that the nodes may connect from, as far as they know, and as seen from here."""
    return {
        address
        for member in members
        for address in (member.join.address, member.channel.address, *member.join.addresses)
        if address
    }
