"""The coordinator of an elastic run: nodes may be lost, leave, come and come back, the coordinator's own included.

What differs from other runs: it writes only by right of its claim on the newest epoch and gives way to a newer one;
between two epochs it puts the plan in force that the planner makes for the nodes that are there; members that hold no
rank are parked spares; and a healthy run is stopped at a step boundary when a larger one pays, or a node will leave.
"""

from __future__ import annotations

import asyncio
import time

from msgspec import json, structs

from orchestrator.agent.faults import policy
from orchestrator.agent.protocol.heartbeat import SelfStallDetector
from orchestrator.agent.protocol.messages import AgentAlive, Done, Join, Prepare, Started, TerminationSignal, Warm
from orchestrator.plan import Exit, Plan
from orchestrator.planner.elastic.next_plan import horizon_s
from orchestrator.run.bad_nodes import remembered
from orchestrator.run.epoch_lease import LeaseLost
from orchestrator.run.folder import write_private
from orchestrator.run.request import used_nodes
from orchestrator.run.state import Cause

from .coordinator import Coordinator
from .election import TICK_S, TURN_TICKS, CoordinatorAddress
from .epoch import Epoch
from .membership import MemberLost, MemberUnfit
from .state_writer import NO_ROOM
from .world_sizes import Sizes

_SETTLE_S = 8.0  # for agents to find a coordinator that has moved; who comes later is a spare
_LOOK_AGAIN_S = 1.0  # whether growing pays by now: the longer nothing happens, the longer nothing will be expected to
_LOSS_GRACE_S = 1.5  # workers notice a dead peer by themselves; those of a frozen one have nothing to wait for


class _Resigned(LeaseLost):
    """This node has to leave a run that goes on."""


class ElasticCoordinator(Coordinator):
    """`plan`: the one that was in force last. `sizes`: what it may become."""

    _elastic = True

    def __init__(self, folder, plan, rules, key, node, recorder, record, sizes: Sizes):
        super().__init__(folder, plan, rules, key, node, recorder, record)
        self._sizes = sizes
        self._leaving: dict[str, str] = {}  # node -> why it will leave
        self._where: CoordinatorAddress | None = None
        self._silent = False  # a node was lost that may live: perhaps it is this one that is cut off, or was frozen
        self._beating = True
        now = asyncio.get_running_loop().time()
        self._stalls = SelfStallDetector()
        self._began, self._changed = now, now  # loop times: of this coordinator, of the last change of nodes
        self._stopped_at: float | None = None
        self._cost_s: float | None = None  # of the last restart, from the request to stop to the workers' start
        self._faults = 0
        self._grow_at: float | None = None  # loop time at which to consider growing

    async def run(self, host: str, port: int = 0) -> policy.Decision:
        """As in every run. Exit.FENCED when a newer coordinator was found: nothing was written after that."""
        try:
            return await super().run(host, port)
        except LeaseLost as error:
            self._note("deposed", reason=str(error))
            code = Exit.RESTART if isinstance(error, _Resigned) else Exit.FENCED
            return policy.Decision(False, "failed", str(error), self._budget, int(code))

    @property
    def _seats(self) -> list[str]:
        return used_nodes(self._plan)

    @property
    def _loss_grace(self) -> float:
        return min(_LOSS_GRACE_S, self._rules.grace_s)

    # ---------------------------------------------------------------------------------- the right to write

    def _say_where(self, host: str, port: int) -> None:
        self._where = CoordinatorAddress(host=host, port=port, node=self._node)
        self._beat()

    def _tick(self) -> None:
        if missed_s := self._stalls.missed_s():  # we were frozen: nodes that have hung up meanwhile may well live
            self._note("was_away", seconds=round(missed_s, 1))
            self._silent = True
        try:
            self._beat()
        except LeaseLost as error:
            self._queue.put_nowait((self.epoch, self._node, error))
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise

    def _beat(self) -> None:
        if not self._beating:
            return
        self._record.reassert()
        self._where = structs.replace(self._where, epoch=self._record.claimed, beat=self._where.beat + 1)
        write_private(self._folder.coordinator, json.encode(self._where), durable=False)

    async def _next(self, end: float | None) -> tuple[str, object] | None:
        event = await super()._next(end)
        if event and isinstance(event[1], LeaseLost):
            raise event[1]
        return event

    # ---------------------------------------------------------------------------------- which nodes, which plan

    async def _gather(self) -> policy.Decision | None:
        """Wait for all nodes that may still come. After the coordinator has moved, not for those that are gone."""
        loop = asyncio.get_running_loop()
        known, moved = self._record.nodes, bool(self._record.nodes)
        gone = {node for node, state in known.items() if state.state in ("lost", "ended")}
        if moved:
            gone |= self._record.take_over()
            self._note_taken_over()
        self._leave_out(set(self._sizes.nodes))
        awaited = {*self._sizes.nodes, *known} - gone - self._group.excluded.keys() | {self._node}
        longest = max(_SETTLE_S, self._rules.heartbeat_timeout_s) if moved else self._rules.join_timeout_s
        last = loop.time() + min(longest, self._rules.join_timeout_s)
        end = min(last, loop.time() + _SETTLE_S) if moved else last
        # those that another coordinator had lost are waited for only where the run would end without them
        while not awaited <= (here := self._group.members.keys()) or len(here) < self._sizes.least:
            event = await self._next(end)
            if event is None:
                if end == last or len(self._group.members) >= self._sizes.least:
                    break
                end = last
                continue
            node, what = event
            if isinstance(what, MemberLost | MemberUnfit):
                awaited.discard(node)
                if isinstance(what, MemberLost):
                    self._group.drop(node, "node_lost", what.text)
                self._note("not_awaited", on=node, reason=what.text)
            elif (
                isinstance(what, TerminationSignal)
                and moved
                and node != self._node
                and not self._folder.cancel.exists()
            ):
                awaited.discard(node)
                self._send_away(node, Exit.RESTART, what.reason)
            elif isinstance(what, TerminationSignal):
                self._ask(what)
                return self._over(self._request.kind, Exit.RESTART, "", f"{self._request.reason}; nothing had started")
        self._group.gathering = False
        if not moved:
            for member in self._group.members.values():
                member.warm = True  # all import at once: none is worth waiting for less than the others
        for node in known.keys() & awaited - self._group.members.keys():
            self._record.lost(node)
        self._note("nodes_joined", nodes=len(self._group.members), coordinator_moved=moved)
        decision = await self._go_on(policy.Decision(True, "restarting", "", self._budget))
        return None if decision.again else decision

    def _leave_out(self, nodes: set[str]) -> None:
        """What the user's node memory says of the nodes that were started, where enough others are left."""
        bad = {node: why for node, why in remembered(self._folder, time.time()).items() if node != self._node}
        if not bad:
            return
        if len(nodes - bad.keys()) < self._sizes.least:
            self._note("bad_nodes_used", nodes=sorted(bad), reason="too few would be left without them")
            return
        self._group.excluded.update(bad)
        for node, why in bad.items():
            self._send_away(node, Exit.NODE, why)
            self._note("node_left_out", on=node, reason=why)

    def _note_taken_over(self) -> None:
        """The end that the last coordinator could not note."""
        last = self._record.last_epoch
        if last and last.cause and last.cause.kind == "coordinator_lost":
            lost = policy.Decision(True, "restarting", last.cause.text, self._budget, cause=last.cause)
            self._note_end(lost, last.epoch)

    async def _replanned(self, decision: policy.Decision) -> policy.Decision:
        if not decision.again:
            return decision
        leaving, self._leaving = self._leaving, {}
        for node, why in leaving.items():
            self._send_away(node, Exit.RESTART, why)
        if decision.exclude:
            self._send_away(decision.exclude, Exit.NODE, decision.reason)
        if self._node in (*leaving, decision.exclude):
            self._record.end_epoch(decision)
            self._note_end(decision)
            raise _Resigned("this node leaves; another one will coordinate")
        if decision.cause:
            self._faults += 1
        if leaving:
            return await self._go_on(decision, "stopped", Exit.RESTART)
        return await self._go_on(decision)

    async def _go_on(
        self, decision: policy.Decision, state: str = "failed", code: Exit = Exit.CAPACITY
    ) -> policy.Decision:
        """Claim the next epoch and put its plan in force, or end the run where the nodes do not suffice."""
        healthy = list(self._group.members)
        plan = await self._sizes.next(self._plan, self._able())
        if plan is None and self._silent:
            plan = await self._step_back()
        if plan is None and code == Exit.CAPACITY:
            plan = await self._await_others()
        if plan is None:
            healthy = list(self._group.members)
            text = f"{len(healthy)} nodes are left, the smallest size of this run is {self._sizes.least}"
            reason = "; ".join(filter(None, (decision.reason, text)))
            if self._request is not None:
                state, code, reason = self._request.kind, Exit.RESTART, f"{self._request.reason}; {reason}"
            return policy.Decision(False, state, reason, self._budget, int(code), cause=decision.cause)
        self._record.claim()
        self._beat()  # with the new claim: agents go only where the newest one is
        if plan.hash != self._plan.hash:
            self._sizes.put_in_force(plan)
            self._record.replanned(plan)
            self._tell_change(self._plan, plan, decision.reason)
            self._plan = plan
        self._record.joined({node: member.join for node, member in self._group.members.items()})
        self._recorder.metrics.set("orch_spare_nodes", len(healthy) - len(self._seats))
        return decision

    def _able(self) -> list[str]:
        """Members whose workers would start at once. Where those are too few, all of them."""
        warm = [node for node, member in self._group.members.items() if member.warm]
        return warm if len(warm) >= self._sizes.least else list(self._group.members)

    async def _step_back(self) -> Plan | None:
        """Too few are heard, but more may live on the other side of a cut: leave the run to whoever claims it there.

        Raises LeaseLost when somebody has. Else the plan for those who have come back, if they suffice by now.
        """
        self._note("stepped_back", nodes=len(self._group.members))
        self._beating = False
        loop = asyncio.get_running_loop()
        turns = len(self._sizes.nodes) * TURN_TICKS * TICK_S
        end = loop.time() + max(2.0, self._rules.heartbeat_timeout_s) + turns + _SETTLE_S
        while loop.time() < end:
            await asyncio.sleep(TICK_S)
            self._record.check()
            if len(self._group.members) >= self._sizes.least:
                break
        self._beating, self._silent = True, False
        return await self._sizes.next(self._plan, self._able())

    async def _await_others(self) -> Plan | None:
        """Too few are left, but others may be on their way back: hold on for a while, with the state in the nodes'
        memories, before the run gives everything up. None when they do not come, or somebody asks for the end."""
        loop, held = asyncio.get_running_loop(), self._rules.min_nodes_grace_s
        if not held or not self._record.nodes:  # at the beginning all have been waited for
            return None
        end, least = loop.time() + held, self._sizes.least
        self._note("awaits_nodes", nodes=len(self._group.members), least=least, seconds=held)
        self._record.update(state="restarting", reason=f"waiting up to {held:g} s for {least} nodes to be there")
        while len(self._group.members) < least:
            event = await self._next(end)
            if event is None:
                return None
            node, what = event
            if isinstance(what, TerminationSignal) and (node == self._node or self._folder.cancel.exists()):
                self._ask(what)
                return None
            if isinstance(what, TerminationSignal):
                self._send_away(node, Exit.RESTART, what.reason)
            elif isinstance(what, MemberLost) and what.member in (None, self._group.members.get(node)):
                self._group.drop(node, "node_lost", what.text)
                self._record.lost(node)
        return await self._sizes.next(self._plan, self._able())

    def _tell_change(self, old: Plan, new: Plan, reason: str) -> None:
        nodes, before = used_nodes(new), used_nodes(old)
        kind = "grow" if len(nodes) > len(before) else "shrink" if len(nodes) < len(before) else "swap"
        self._recorder.metrics.add("orch_replans", 1, kind)
        par = new.parallel
        batch = {
            "pp": par.pp,
            "dp": par.dp,
            "micro_batch_size": par.micro_batch_size,
            "micro_batches": par.micro_batches,
        }
        if par.replica_micro_batches:
            batch["replica_micro_batches"] = par.replica_micro_batches
        self._note("replanned", how=kind, nodes=nodes, plan=new.hash, **batch, reason=reason)
        self._changed = asyncio.get_running_loop().time()

    def _send_away(self, node: str, code: Exit, why: str) -> None:
        if member := self._group.members.get(node):
            member.channel.send(self.epoch, Done(code=int(code), reason=why))
            self._group.drop(node, "node_left", why)
            self._record.left(node)

    # ---------------------------------------------------------------------------------- while an epoch lives

    def _take(self, now: Epoch, node: str, what: object) -> None:
        if isinstance(what, Join):  # it is parked until the next epoch
            if member := self._group.members.get(node):
                member.channel.send(self.epoch, Prepare())
                self._record.parked(node, what)
                self._note("node_joined", on=node)
                self._recorder.metrics.set("orch_healthy_nodes", len(self._group.members))
                self._consider(now)
        elif isinstance(what, Warm):
            self._consider(now)
        elif isinstance(what, TerminationSignal) and not self._folder.cancel.exists():
            self._leave(now, node, what)
        else:
            super()._take(now, node, what)
            self._silent = self._silent or (isinstance(what, MemberLost) and what.silent)
            if isinstance(what, Started) and now.started.issuperset(self._seats):
                self._now_running(now)

    def _leave(self, now: Epoch, node: str, notice: TerminationSignal) -> None:
        """One node is told to end: the others save with it, and go on without it. The run ends when too few stay."""
        if node not in self._group.members:
            return
        if node not in self._seats:
            self._send_away(node, Exit.RESTART, notice.reason)
            return
        self._leaving[node] = notice.reason
        staying = self._group.members.keys() - self._leaving.keys()
        if set(self._seats) <= self._leaving.keys() and len(staying) < self._sizes.least:
            self._ask(notice)
        now.resize = now.resize or f"a node leaves ({notice.reason})"
        grace = self._failure_grace if notice.force else self._rules.grace_s
        self._stop_all(now, now.resize, notice.signal, grace, force=notice.force)

    def _look(self, now: Epoch, node: str, what: AgentAlive) -> None:
        super()._look(now, node, what)
        nodes = self._detector.lastingly_slow()
        if not nodes or self._rules.on_straggler != "exclude" or now.stopping or now.fault:
            return
        if len(self._able()) > len(self._seats):
            slowest, ratio = max(nodes.items(), key=lambda item: item[1])
            now.resize = f"{slowest} is slow: its own compute time is {ratio:g} times the median of its peers'"
            now.slow = Cause(kind="straggler", text=now.resize, epoch=self.epoch, node=slowest, step=self._reported)
            self._stop_all(now, now.resize, "SIGTERM", self._rules.grace_s)

    def _stop_all(self, now: Epoch, *arguments: object, **named: object) -> None:
        if not now.stopping:
            self._stopped_at = asyncio.get_running_loop().time()
        self._grow_at = None
        super()._stop_all(now, *arguments, **named)

    def _now_running(self, now: Epoch) -> None:
        self._silent = False
        loop = asyncio.get_running_loop()
        if self._stopped_at is not None:
            self._cost_s = loop.time() - self._stopped_at
        self._sizes.prepare()
        self._consider(now)

    def _wake(self, now: Epoch) -> float | None:
        times = [time for time in (now.deadline, self._grow_at) if time is not None]
        return min(times, default=None)

    def _woken(self, now: Epoch) -> None:
        if now.deadline is not None and asyncio.get_running_loop().time() >= now.deadline:
            super()._woken(now)
        else:
            self._consider(now)

    def _consider(self, now: Epoch) -> None:
        """Stop for a larger plan where that pays; where there is one, look again later."""
        time = asyncio.get_running_loop().time()
        self._grow_at = None
        if now.stopping or not now.started.issuperset(self._seats):
            return
        left = (self._plan.job.train.steps - max(self._furthest, self._reported)) * self._plan.time.step_s
        stable = time - self._changed
        horizon = horizon_s(left, time - self._began, self._faults, stable)
        times = {"stable_s": stable, "cost_s": self._cost_s, "horizon_s": horizon}
        warm = len(self._able())
        larger = self._sizes.worth(self._plan, warm, **times)
        if larger is not None:
            now.resize = f"growing from {len(self._seats)} to {len(used_nodes(larger))} nodes"
            self._note("growing", nodes=len(used_nodes(larger)), horizon_s=round(horizon, 1), cost_s=self._cost_s)
            self._stop_all(now, now.resize, "SIGTERM", self._rules.grace_s)
        elif self._sizes.larger(self._plan, warm):
            self._grow_at = time + max(_LOOK_AGAIN_S, self._sizes.scale_up.dwell_s - stable)

    @property
    def _reported(self) -> int:
        steps = (member.step for member in self._group.members.values())
        return max((step for step in steps if step is not None), default=0)
