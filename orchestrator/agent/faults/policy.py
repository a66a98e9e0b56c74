"""Decides what happens after an epoch has ended. Pure.

Whether a run goes on is decided here; with which nodes an elastic run goes on is decided by the
planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.plan.exits import FATAL, Exit, meaning
from orchestrator.run.state import WORKER_CAUSES, Cause

from .attribution import EXTERNAL_CODES, NO_FAULTS, FaultHistory, attribute

#: Saved-and-wants-restart exits in a row without one new step, after which starting again is
#: pointless.
MOST_FRUITLESS = 5

#: Codes that end the run with themselves: starting the same thing again on the same nodes cannot
#: help.
_FINAL_CODES = FATAL | {Exit.NODE, Exit.CAPACITY, Exit.FENCED}


@dataclass(frozen=True)
class WorkerEnd:
    """The end of one worker. `order`: in which the coordinator was told of the ends."""

    rank: int
    node: str
    code: int
    asked: bool  # it had been told to stop
    order: int
    step: int | None = None
    log: str = ""
    tail: tuple[str, ...] = ()
    cause: str = ""  # of its failure, as it has reported it
    error: str = ""


@dataclass(frozen=True)
class NodeLoss:
    node: str
    text: str


@dataclass(frozen=True)
class Request:
    """Somebody has asked for the end of the run."""

    kind: Literal["cancelled", "stopped"]
    reason: str


@dataclass(frozen=True)
class EpochEnd:
    """What is known once every worker of an epoch is gone."""

    epoch: int
    world_size: int
    ends: tuple[WorkerEnd, ...]
    lost: tuple[NodeLoss, ...] = ()
    request: Request | None = None
    new_steps: bool = False  # a step beyond all earlier epochs was completed
    elastic: bool = False  # the run can go on with other nodes
    resize: str = ""  # why all were asked to save and stop: nodes have come, or will leave
    slow: Cause | None = None  # of a resize: the straggler that makes room for a spare
    fault: Cause | None = None  # what the workers were ended for, where that was seen from outside


@dataclass(frozen=True)
class Budget:
    max_restarts: int
    used: int = 0  # counted restarts, of all causes
    fruitless: int = 0  # uncounted ones in a row without a new step
    limits: Mapping[str, int] = field(
        default_factory=dict
    )  # kinds of cause that have a budget of their own
    by_cause: Mapping[str, int] = field(default_factory=dict)  # counted restarts by kind

    def allows(self, kind: str) -> bool:
        """Whether a fault of this kind may be followed by a restart."""
        if kind in self.limits:
            return self.by_cause.get(kind, 0) < self.limits[kind]
        return (
            self.used - sum(self.by_cause.get(limited, 0) for limited in self.limits)
            < self.max_restarts
        )

    def with_restart(self, kind: str) -> Budget:
        by_cause = {**self.by_cause, kind: self.by_cause.get(kind, 0) + 1}
        return replace(self, used=self.used + 1, fruitless=0, by_cause=by_cause)

    def setting(self, kind: str) -> str:
        limited = kind in self.limits
        return (
            f"max_restarts_by_cause.{kind}={self.limits[kind]}"
            if limited
            else f"max_restarts={self.max_restarts}"
        )


FinalState = Literal["done", "failed", "cancelled", "stopped"]


@dataclass(frozen=True)
class Decision:
    """`again`: start the next epoch. Otherwise the run ends in `state` with `code`."""

    again: bool
    state: FinalState | Literal["restarting"]
    reason: str
    budget: Budget
    code: int = 0
    counted: bool = False
    cause: Cause | None = None
    exclude: str | None = None  # the node that the next epoch must do without


def first_cause(ends: tuple[WorkerEnd, ...]) -> WorkerEnd | None:
    """The end that explains the others, None if no worker failed.

    When one worker dies, its peers fail in their collectives and exit with 75 or an error of their
    own, and their agents may report earlier. So workers that nobody had told to stop come first;
    among them a signal or an error comes before a 75, which may follow from a peer's end; then the
    order of the reports decides.
    """
    failed = [end for end in ends if end.code != 0]
    spontaneous = [end for end in failed if not end.asked]
    candidates = spontaneous or failed
    return min(candidates, key=lambda end: (end.code == Exit.RESTART, end.order), default=None)


def cause_of(end: WorkerEnd, epoch: int) -> Cause:
    location = f"rank {end.rank} on {end.node}"
    ending = meaning(end.code)
    code = "" if end.code < 0 or ending.startswith("exit code") else f" (exit {end.code})"
    step_clause = f" after step {end.step}" if end.step is not None else ""
    reported = end.cause in WORKER_CAUSES
    return Cause(
        kind=end.cause if reported else "worker_exit",
        text=f"{location}: {ending}{code}{step_clause}"
        + (f": {end.error}" if reported and end.error else ""),
        epoch=epoch,
        node=end.node,
        rank=end.rank,
        code=end.code,
        step=end.step,
        log=end.log,
        tail=list(end.tail),
    )


def decide(end: EpochEnd, budget: Budget, history: FaultHistory = NO_FAULTS) -> Decision:
    """What follows after an epoch: the table of docs/protocol.md, Decisions, in the order in which
    its rows apply."""
    complete = len(end.ends) == end.world_size
    if complete and all(worker.code == 0 for worker in end.ends):
        return Decision(
            again=False, state="done", code=0, reason="all workers are done", budget=budget
        )

    first_failure = first_cause(end.ends)
    cause = end.fault or (cause_of(first_failure, end.epoch) if first_failure else None)

    if end.lost and end.request is None:
        loss = end.lost[0]
        cause_of_loss = Cause(
            kind="node_lost", text=f"{loss.node}: {loss.text}", epoch=end.epoch, node=loss.node
        )
        if end.elastic:
            return Decision(
                again=True,
                state="restarting",
                reason=cause_of_loss.text,
                budget=budget,
                cause=cause_of_loss,
            )
        return _end_run("failed", Exit.CAPACITY, cause_of_loss.text, budget, cause_of_loss)

    if end.request is not None:
        if (
            first_failure
            and cause
            and end.fault is None
            and not first_failure.asked
            and first_failure.code in FATAL
        ):
            return _end_run("failed", first_failure.code, cause.text, budget, cause)
        if not end.ends or (
            complete and all(worker.code in (0, Exit.RESTART) for worker in end.ends)
        ):
            suffix = "" if end.ends else "; before any worker had started"
            return _end_run(
                end.request.kind, Exit.RESTART, end.request.reason + suffix, budget, None
            )
        return _end_without_save(end, end.request, budget, cause)

    if (
        end.fault is None
        and end.resize
        and (first_failure is None or first_failure.asked or first_failure.code == Exit.RESTART)
    ):
        if end.slow:
            return _restart_without(end.slow, end.resize, budget)
        return Decision(again=True, state="restarting", reason=end.resize, budget=budget)

    if cause is None:  # nobody failed, yet not all ended: only a lost node or a request does that
        reason = f"{end.world_size - len(end.ends)} workers are unaccounted for"
        return _end_run(
            "failed",
            Exit.INTERNAL,
            reason,
            budget,
            Cause(kind="internal", text=reason, epoch=end.epoch),
        )

    return _after_failure(
        end, cause, 1 if end.fault or first_failure is None else first_failure.code, budget, history
    )


def _end_without_save(
    end: EpochEnd, request: Request, budget: Budget, cause: Cause | None
) -> Decision:
    """The end of a run that was asked for, without a whole save: a worker that failed over it is
    named.

    One that was killed, or that knows nothing of signals, has not failed.
    """
    explanation = "not every worker saved"
    failed = [worker for worker in end.ends if worker.code and worker.code not in EXTERNAL_CODES]
    if failed:
        worst = min(failed, key=lambda worker: (not worker.asked, worker.order))
        cause = end.fault or cause_of(worst, end.epoch)
        conduct = "was asked to save and failed" if worst.asked else "failed"
        step_clause = f" after step {worst.step}" if worst.step is not None else ""
        explanation = (
            f"rank {worst.rank} on {worst.node} {conduct}: {meaning(worst.code)}{step_clause}"
        )
    return _end_run(request.kind, Exit.RESTART, f"{request.reason}; {explanation}", budget, cause)


def _after_failure(
    end: EpochEnd, cause: Cause, code: int, budget: Budget, history: FaultHistory
) -> Decision:
    """The rows for an epoch that ended by a failure. `code`: of the worker that failed first."""
    if code == Exit.NODE and end.elastic:
        return _restart_without(cause, cause.text, budget)

    if cause.kind == "disk_full":  # what was saved before is whole; starting again makes no room
        return _end_run(
            "stopped", Exit.RESTART, f"{cause.text}; make room and resume", budget, cause
        )

    if code in _FINAL_CODES:
        return _end_run("failed", code, cause.text, budget, cause)

    if code == Exit.RESTART:
        fruitless = 0 if end.new_steps else budget.fruitless + 1
        budget = replace(budget, fruitless=fruitless)
        if fruitless > MOST_FRUITLESS:
            reason = f"{cause.text}; {MOST_FRUITLESS} restarts in a row without a new step"
            return _end_run("stopped", Exit.RESTART, reason, budget, cause)
        return Decision(
            again=True, state="restarting", reason=cause.text, budget=budget, cause=cause
        )

    attribution = attribute(cause, history)
    if attribution.at_fault == "data":
        return _end_run("failed", Exit.CONFIG, attribution.text, budget, cause)
    if attribution.at_fault == "node":
        if end.elastic:
            return _restart_without(cause, attribution.text, budget)
        return _end_run("failed", Exit.NODE, attribution.text, budget, cause)
    if not budget.allows(cause.kind):
        exhausted = (
            f"; {budget.setting(cause.kind)} used up" if budget.by_cause or budget.used else ""
        )
        code = (
            Exit.CONFIG
            if cause.kind == "non_finite"
            else Exit.INTERNAL
            if code == Exit.INTERNAL
            else Exit.USER
        )
        return _end_run("failed", code, cause.text + exhausted, budget, cause)
    budget = budget.with_restart(cause.kind)
    return Decision(
        again=True, state="restarting", reason=cause.text, budget=budget, counted=True, cause=cause
    )


def _restart_without(cause: Cause, reason: str, budget: Budget) -> Decision:
    """Restart on other nodes, excluding the node in `cause`."""
    return Decision(True, "restarting", reason, budget, cause=cause, exclude=cause.node)


def _end_run(
    state: FinalState, code: int, reason: str, budget: Budget, cause: Cause | None
) -> Decision:
    return Decision(
        again=False, state=state, code=int(code), reason=reason, budget=budget, cause=cause
    )
