"""The coordinator: one writer of epochs and of the run's state. It lives in the agent of the plan's first node.

It is a class of its own with its own connection to every agent, that one included, so that it can be moved (`elastic`
builds on it). The run is one straight line of code: gather the nodes, live epochs until the policy says that it is
over, save what only memories hold, finish. What agents send comes in through one queue, so there is one order of events
and no lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import msgspec

from orchestrator.agent.faults import policy
from orchestrator.agent.faults.attribution import FaultHistory
from orchestrator.agent.faults.detector import HangDetector
from orchestrator.agent.faults.diagnosis import Diagnosis
from orchestrator.agent.node.recorder import Recorder
from orchestrator.agent.protocol.channel import LONGEST_LINE
from orchestrator.agent.protocol.messages import (
    AgentAlive,
    Done,
    Examine,
    Prepare,
    Ready,
    Started,
    Stop,
    Stopped,
    TerminationSignal,
    WorkerExit,
)
from orchestrator.plan import Exit, Plan
from orchestrator.run.bad_nodes import remember
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.request import Policy, used_nodes
from orchestrator.run.state import Cause

from .epoch import Epoch, assignment, some
from .final_checkpoint import FinalCheckpoint, is_due
from .membership import Member, MemberLost, Membership, MemberUnfit
from .state_writer import NO_ROOM

_FAILURE_GRACE_S = 3.0  # for the peers of a failed worker: they have nothing to save together any more
_UNKILLABLE_S = 30.0  # after SIGKILL; a process that lives longer hangs in the kernel

log = logging.getLogger("orch.coordinator")


class Coordinator:
    _elastic = False

    def __init__(self, folder: RunFolder, plan: Plan, rules: Policy, key: bytes, node: str, recorder: Recorder, record):
        self._folder, self._plan, self._rules, self._key = folder, plan, rules, key
        self._node, self._recorder, self._record = node, recorder, record
        self._expected = used_nodes(plan)
        self._queue: asyncio.Queue[tuple[int, str, object]] = asyncio.Queue()  # (epoch when heard, node, what)
        self._group = Membership(
            run=folder.run_id,
            plan=plan,
            key=key,
            expected=self._expected,
            epoch=lambda: record.epoch,
            tell=lambda node, what: self._queue.put_nowait((record.epoch, node, what)),
            note=self._note,
            silence_s=rules.heartbeat_timeout_s,
            elastic=self._elastic,
        )
        self._request: policy.Request | None = None
        self._budget = policy.Budget(
            rules.max_restarts, record.restarts, 0, rules.max_restarts_by_cause, record.restarts_by_cause
        )
        self._group.excluded.update(record.excluded)
        self._detector = HangDetector(rules)
        self._furthest = -1  # last step completed in any epoch

    @property
    def epoch(self) -> int:
        return self._record.epoch

    async def run(self, host: str, port: int = 0) -> policy.Decision:
        """Coordinate until the run is over; the decision that ended it."""
        server = await asyncio.start_server(self._group.connected, host, port, limit=LONGEST_LINE)
        ticker = asyncio.create_task(self._group.tick(self._tick))
        try:
            self._say_where(*server.sockets[0].getsockname()[:2])
            self._record.update(state="starting", reason=f"waiting for {len(self._expected)} nodes")
            decision = await self._gather()
            while decision is None or decision.again:
                ended = await self._live()
                past = FaultHistory(tuple(self._record.causes), len(self._seats), self._rules.bad_node_after)
                decision = policy.decide(ended, self._budget, past)
                self._remember_bad(decision)
                decision = await self._replanned(decision)
                self._budget = decision.budget
                self._record.end_epoch(decision)
                if decision.cause:
                    self._recorder.metrics.add("orch_faults", 1, decision.cause.kind, "agent")
                if decision.again:
                    self._recorder.metrics.add("orch_restarts", 1, "failure" if decision.counted else "saved")
                self._note_end(decision)
            decision = await self._flushed(decision)
            await self._finish(decision)
            return decision
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            decision = self._over("stopped", Exit.RESTART, "disk_full", f"no room for the run's state: {error}")
            await self._finish(decision)
            return decision
        finally:
            ticker.cancel()
            server.close()
            self._group.close()

    async def _flushed(self, decision: policy.Decision) -> policy.Decision:
        """The decision, with what became of the state that only the nodes' memories held."""
        if not is_due(self._folder, self._plan, decision):
            return decision
        flush = FinalCheckpoint(self._plan, self._rules, self._group, self._record, self._next, self._note)
        told = await flush.run()
        return replace(decision, reason="; ".join(filter(None, (decision.reason, told))))

    def _note_end(self, decision: policy.Decision, epoch: int | None = None) -> None:
        cause = decision.cause
        about = {"fault": cause.kind, "on": cause.node, "rank": cause.rank, "code": cause.code} if cause else {}
        said = {"reason": decision.reason, "again": decision.again, "counted": decision.counted, **about}
        self._note("epoch_ended", epoch=self.epoch if epoch is None else epoch, **said)

    def _say_where(self, host: str, port: int) -> None:
        write_private(self._folder.coordinator, msgspec.json.encode({"host": host, "port": port}))

    def _tick(self) -> None:
        """Once a heartbeat."""
        self._record.retry()

    def _remember_bad(self, decision: policy.Decision) -> None:
        """A node that is left out stays out: of this attempt whoever coordinates it, and of the user's next runs."""
        node = decision.exclude or (decision.cause.node if decision.code == Exit.NODE and decision.cause else None)
        if node:
            self._note("node_excluded", on=node, reason=decision.reason)
            self._group.excluded[node] = decision.reason
            self._record.exclude(node, decision.reason)
            remember(self._folder, node, decision.reason, self._rules.remember_bad_nodes_h, time.time())

    async def _replanned(self, decision: policy.Decision) -> policy.Decision:
        """The decision, with the next epoch's plan in force where that is another one."""
        return decision

    def host_left(self) -> None:
        """The agent beside this coordinator is gone. While nodes gather, no lost connection may tell."""
        if self._group.gathering:
            notice = TerminationSignal(
                reason=f"{self._node}: its agent left before all nodes had come", signal="SIGTERM", force=False
            )
            self._queue.put_nowait((self.epoch, self._node, notice))

    # ---------------------------------------------------------------------------------- phases

    async def _gather(self) -> policy.Decision | None:
        """Wait for every node of the plan. None: all are here."""
        end = asyncio.get_running_loop().time() + self._rules.join_timeout_s
        while len(self._group.members) < len(self._expected):
            event = await self._next(end)
            if event is None:
                missing = [node for node in self._expected if node not in self._group.members]
                text = f"{some(missing)} did not join within {self._rules.join_timeout_s:g} s"
                return self._over("failed", Exit.CAPACITY, "join_timeout", text)
            node, what = event
            if isinstance(what, MemberLost):
                return self._over("failed", Exit.CAPACITY, "node_lost", f"{node}: {what.text}", node)
            if isinstance(what, MemberUnfit):
                return self._over("failed", what.code, "node_unfit", what.text, node)
            if isinstance(what, TerminationSignal):
                self._ask(what)
                return self._over(self._request.kind, Exit.RESTART, "", f"{self._request.reason}; nothing had started")
        self._group.gathering = False
        self._record.joined({node: self._group.members[node].join for node in self._expected})
        self._note("nodes_joined", nodes=len(self._group.members))
        return None

    async def _live(self) -> policy.EpochEnd:
        """One life of the workers, from the new epoch to the last of them gone."""
        now = Epoch()
        before = self._furthest
        self._detector.begin_epoch(self._plan)
        self._record.begin_epoch()  # on disk before anybody hears of it
        self._note("epoch_began", epoch=self.epoch)
        self._recorder.metrics.set("orch_wanted_nodes", len(self._seats))
        self._recorder.metrics.set("orch_healthy_nodes", len(self._group.members))
        for member in self._group.members.values():
            member.ready = None
            member.channel.send(self.epoch, Prepare())
        end = asyncio.get_running_loop().time() + self._rules.join_timeout_s
        while (late := [node for node, member in self._seated() if member.ready is None]) and not now.stopping:
            event = await self._next(end)
            self._take(now, *(event or (late[0], MemberLost("no answer to a new epoch"))))
        if not now.stopping:
            self._assign()
        while not self._is_over(now):
            event = await self._next(self._wake(now))
            if event is not None:
                self._take(now, *event)
            else:
                self._woken(now)
        return policy.EpochEnd(
            epoch=self.epoch,
            world_size=len(self._plan.ranks),
            ends=tuple(now.ends),
            lost=tuple(now.lost),
            request=self._request,
            new_steps=self._furthest > before,
            elastic=self._elastic,
            resize=now.resize,
            slow=now.slow,
            fault=now.told_fault(),
        )

    def _wake(self, now: Epoch) -> float | None:
        """Loop time at which to do something though nobody has said anything."""
        return now.deadline

    def _woken(self, now: Epoch) -> None:
        late = self._busy(now)
        self._take(now, late[0], MemberLost("its workers cannot be killed"))

    @property
    def _seats(self) -> list[str]:
        """Nodes that have ranks in this epoch, in the plan's order."""
        return self._expected

    def _seated(self) -> list[tuple[str, Member]]:
        return [(node, member) for node, member in self._group.members.items() if node in self._seats]

    def _assign(self) -> None:
        """Tell every node its slice of the rank map, and where rank 0 will listen."""
        first = self._group.members[self._plan.ranks[0].node]
        for index, node in enumerate(self._seats):
            self._group.members[node].channel.send(self.epoch, assignment(self._plan, node, index, first))

    def _is_over(self, now: Epoch) -> bool:
        return not self._busy(now)

    def _busy(self, now: Epoch) -> list[str]:
        """Nodes whose workers of this epoch may still run. One that was lost and has come again has none."""
        over = now.stopped | {loss.node for loss in now.lost}
        return [node for node, _ in self._seated() if node not in over]

    async def _finish(self, decision: policy.Decision) -> None:
        self._record.finish(decision)
        self._note("run_ended", state=decision.state, code=decision.code, reason=decision.reason)
        for member in self._group.members.values():
            member.channel.send(self.epoch, Done(code=decision.code, reason=decision.reason))
        end = asyncio.get_running_loop().time() + self._rules.grace_s
        while self._group.members:  # an agent closes when it has nothing left to do
            event = await self._next(end)
            if event is None:
                break
            if isinstance(event[1], MemberLost):
                self._group.drop(event[0], "node_left", event[1].text)

    # ---------------------------------------------------------------------------------- events

    def _take(self, now: Epoch, node: str, what: object) -> None:
        """One event of an epoch."""
        member = self._group.members.get(node)
        if isinstance(what, MemberLost):
            if member is None or what.member not in (None, member):
                return
            if node in self._seats:
                now.lost.append(policy.NodeLoss(node, what.text))
            self._group.drop(node, "node_lost", what.text)
            self._record.lost(node)
            self._recorder.metrics.set("orch_healthy_nodes", len(self._group.members))
            if node in self._seats:
                self._stop_all(now, f"node {node} is lost", "SIGTERM", self._loss_grace)
        elif member is None:
            return  # said before it was lost
        elif isinstance(what, Ready):
            member.ready = what
        elif isinstance(what, Started):
            now.started.add(node)
            if now.started.issuperset(self._seats):
                self._record.running()
                self._note("epoch_runs", epoch=self.epoch, workers=len(self._plan.ranks))
        elif isinstance(what, WorkerExit):
            self._worker_ended(now, node, what)
        elif isinstance(what, Stopped):
            now.stopped.add(node)
        elif isinstance(what, AgentAlive):
            self._look(now, node, what)
        elif isinstance(what, TerminationSignal):
            self._ask(what)
            grace = 0.0 if what.force else self._rules.grace_s
            self._stop_all(now, self._request.reason, what.signal, grace, force=what.force)

    def _look(self, now: Epoch, node: str, what: AgentAlive) -> None:
        """An agent says what its workers do: who holds the run up, and who is slow?"""
        if now.stopping or now.fault or not now.started.issuperset(self._seats):
            return
        clock = asyncio.get_running_loop().time()
        self._detector.hear(node, what.seen, clock)
        diagnosis = self._detector.diagnosis(clock)
        if diagnosis is not None:
            self._fail(now, diagnosis)
        elif (slow := self._detector.slow()) is not None:
            self._slow(now, slow)

    def _fail(self, now: Epoch, found: Diagnosis) -> None:
        """Save where all are, end the one that holds them up, and with it the epoch."""
        now.fail(found, self._folder, self.epoch)
        self._note("fault_detected", cause=found.kind, reason=found.text, on=found.node, rank=found.rank)
        for node, member in self._seated():
            end = [found.rank] if node == found.node else []
            member.channel.send(self.epoch, Examine(reason=found.text, end=end))
        if found.rank is None:
            self._stop_all(now, found.text, "SIGTERM", self._loss_grace)

    def _slow(self, now: Epoch, nodes: dict[str, float]) -> None:
        """Other nodes than before are slow."""
        for node, ratio in nodes.items():
            self._note("straggler", on=node, ratio=ratio)
        self._record.slow(nodes)
        for node, member in self._seated():
            member.slowdown = nodes.get(node, 1.0)

    def _worker_ended(self, now: Epoch, node: str, what: WorkerExit) -> None:
        self._furthest = max(self._furthest, -1 if what.step is None else what.step)
        now.ends.append(
            policy.WorkerEnd(
                rank=what.rank,
                node=node,
                code=what.code,
                asked=what.asked,
                order=len(now.ends),
                step=what.step,
                log=str(self._folder.rank_log(what.rank).relative_to(self._folder.path)),
                tail=tuple(what.tail),
                cause=what.cause,
                error=what.error,
            )
        )
        self._note("worker_ended", rank=what.rank, on=node, code=what.code, asked=what.asked, step=what.step)
        if what.code != 0:
            reason = now.fault.text if now.fault else policy.cause_of(now.ends[-1], self.epoch).text
            saved = what.code == Exit.RESTART  # its peers are saving too: let them
            self._stop_all(now, reason, "SIGTERM", self._rules.grace_s if saved else self._failure_grace)

    @property
    def _failure_grace(self) -> float:
        return min(_FAILURE_GRACE_S, self._rules.grace_s)

    @property
    def _loss_grace(self) -> float:
        return self._failure_grace

    def _stop_all(self, now: Epoch, reason: str, signum: str, grace_s: float, force: bool = False) -> None:
        """Ask every worker to end, once; `force` asks again."""
        if now.stopping and not force:
            return
        now.stopping = True
        now.deadline = asyncio.get_running_loop().time() + grace_s + _UNKILLABLE_S
        self._note("epoch_stops", epoch=self.epoch, reason=reason)
        self._record.update(state="stopping" if self._request else "restarting", reason=reason)
        for member in self._group.members.values():
            member.channel.send(self.epoch, Stop(reason=reason, signal=signum, grace_s=grace_s))

    def _ask(self, notice: TerminationSignal) -> None:
        if self._request is None:
            kind = "cancelled" if self._folder.cancel.exists() else "stopped"
            self._request = policy.Request(kind, "cancelled by the user" if kind == "cancelled" else notice.reason)

    async def _next(self, end: float | None) -> tuple[str, object] | None:
        """The next event, None when loop time `end` has come."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                left = None if end is None else max(0.0, end - loop.time())
                epoch, node, what = await asyncio.wait_for(self._queue.get(), left)
            except TimeoutError:
                return None
            # an answer that was still in the queue when its epoch ended must not count for the next one
            if epoch == self.epoch or isinstance(what, MemberLost | TerminationSignal):
                return node, what

    def _over(self, state: str, code: int, kind: str, text: str, node: str | None = None) -> policy.Decision:
        """The decision that ends a run whose workers never started."""
        cause = Cause(kind=kind, text=text, epoch=self.epoch, node=node) if kind else None
        return policy.Decision(False, state, text, self._budget, int(code), cause=cause)

    def _note(self, name: str, **fields: object) -> None:
        log.info("%s %s", name, " ".join(f"{key}={value}" for key, value in fields.items()))
        self._recorder.event(name, **fields)
