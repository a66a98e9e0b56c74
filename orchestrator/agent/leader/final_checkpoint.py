"""Writes in-memory checkpoint replicas to disk before a run ends for lack of nodes.

Between checkpoints, the newest state of each rank is in the memory of two nodes
(trainer/checkpoint/replicas). Nodes that are too few to train still hold it until they are
released. They get an epoch of their own, with its own fencing token, in which one process per
node, not one per rank, saves the state (`python -m trainer --final-checkpoint`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from msgspec import structs

from orchestrator.agent.faults.policy import Decision
from orchestrator.agent.protocol import messages
from orchestrator.plan import Exit, Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import read_request

from .context import Context
from .epoch import assignment
from .membership import MemberLost

_KILL_S = 5.0  # for processes that receive SIGKILL

#: Exit codes after which the newest state is worth saving. Codes that blame the job itself (64, 65,
#: 78) are not among them: its user may want to go back further, and retention counts checkpoints.
_WORTH_SAVING = (
    Exit.CAPACITY,
    Exit.NODE,
    Exit.USER,
    Exit.INTERNAL,
    Exit.RESTART,
)


def is_due(folder: RunFolder, plan: Plan, decision: Decision) -> bool:
    """Returns whether the newest state of a run that ends like this may be in memory only."""
    if not plan.job.checkpoint.memory_every_steps or decision.code not in _WORTH_SAVING:
        return False
    kind = decision.cause.kind if decision.cause else ""
    if kind == "disk_full" or (decision.code == Exit.RESTART and not kind):  # all ranks have saved
        return False
    return read_request(folder).worker.bundled


@dataclass
class _Attempt:
    """One epoch that saves the state; `lost` and `stopped` are nodes."""

    nodes: list[str]
    lost: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    ends: list[messages.WorkerExit] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.lost | self.stopped >= set(self.nodes)

    @property
    def step(self) -> int | None:
        """The step that was saved, or None."""
        for end in self.ends:
            if end.code == 0 and end.step is not None:
                return end.step
        return None

    @property
    def error(self) -> str:
        """The error of the first failed process by rank, or "". Exit code 75 explains least."""
        failed = [end for end in self.ends if end.code]
        if not failed:
            return ""
        first = min(failed, key=lambda end: (end.code == Exit.RESTART, end.rank))
        return first.error or f"exit code {first.code}"


class FinalCheckpoint:
    """Saves the state in the nodes' memories at the end of one run. See the module."""

    def __init__(self, context: Context):
        self._context = context
        self._state_writer = context.state_writer
        self._members = context.members
        self._deadline = 0.0  # loop time

    async def run(self) -> str:
        """Saves the state in at most `grace_s`; returns a clause for the reason of the run's end.

        The clause is "" if there was nothing to save.
        """
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._context.rules.grace_s
        clause = ""
        outcome = "nothing to save"
        while nodes := list(self._members):
            attempt = _Attempt(nodes)
            await self._save_once(attempt)
            if attempt.step is not None:
                outcome = "saved"
                clause = f"the state after step {attempt.step} was saved from the nodes' memories"
            elif loop.time() >= self._deadline:
                outcome = "not saved"
                clause = "the state in the nodes' memories was not saved in time"
            elif attempt.error:
                outcome = "not saved"
                clause = f"the state in the nodes' memories was not saved: {attempt.error}"
            # After the loss of a node, the others may still hold the whole state.
            retry = attempt.step is None and bool(attempt.lost) and loop.time() < self._deadline
            self._state_writer.end_final_checkpoint(outcome)
            self._context.record_event(
                "flush_ended",
                step=attempt.step,
                reason=clause,
                again=retry,
            )
            if not retry:
                break
        return clause

    async def _save_once(self, attempt: _Attempt) -> None:
        """Runs one epoch that saves the state."""
        self._state_writer.update(
            state="stopping", reason="saving the state in the nodes' memories"
        )
        await self._context.begin_epoch()
        self._context.record_event(
            "flush_began",
            epoch=self._state_writer.epoch,
            nodes=len(attempt.nodes),
        )
        for node in attempt.nodes:
            self._members[node].ready = None
            self._send(node, messages.Prepare())
        while any(
            self._members[node].ready is None for node in attempt.nodes if node not in attempt.lost
        ):
            if attempt.lost or not await self._handle_next(attempt, self._deadline):
                return
        self._assign(attempt.nodes)
        while not attempt.is_over:
            if not await self._handle_next(attempt, self._deadline):
                break
        if not attempt.is_over:
            kill = messages.Stop(
                reason="no time is left",
                signal="SIGKILL",
                grace_s=0.0,
            )
            for node in attempt.nodes:
                self._send(node, kill)
        while not attempt.is_over and await self._handle_next(attempt, self._deadline + _KILL_S):
            pass

    def _assign(self, nodes: list[str]) -> None:
        """Assigns one saving process to each node, with the node's number as its rank."""
        first = self._members[nodes[0]]
        members = self._members.values()
        for index, node in enumerate(nodes):
            training = assignment(self._context.plan, node, index, first, members)
            saving = structs.replace(
                training,
                ranks=[messages.RankAssignment(index, 0)],
                world_size=len(nodes),
                final_checkpoint=True,
            )
            self._send(node, saving)

    def _send(self, node: str, message: messages.Prepare | messages.Assign | messages.Stop) -> None:
        if member := self._members.get(node):
            member.channel.send(self._state_writer.epoch, message)

    async def _handle_next(self, attempt: _Attempt, until: float) -> bool:
        """Handles one event. False at loop time `until`, or after a forced termination signal."""
        event = await self._context.next_event(until)
        if event is None:
            return False
        node = event.node
        message = event.message
        member = self._members.get(node)
        if isinstance(message, MemberLost):
            if member is not None and message.concerns(member):
                self._context.remove_lost_node(node, message.reason)
                attempt.lost.add(node)
        elif isinstance(message, messages.Ready) and member is not None:
            member.ready = message
        elif isinstance(message, messages.WorkerExit):
            attempt.ends.append(message)
        elif isinstance(message, messages.Stopped):
            attempt.stopped.add(node)
        elif isinstance(message, messages.TerminationSignal) and message.force:
            self._deadline = min(self._deadline, asyncio.get_running_loop().time())
            return False
        return True
