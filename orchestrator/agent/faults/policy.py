"""Decides what follows the end of an epoch. Pure.

The decision is whether a run continues; the planner decides with which nodes an elastic run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from orchestrator.plan.exits import FATAL, Exit, meaning
from orchestrator.run.state import WORKER_CAUSES, Cause

from .attribution import EXTERNAL_CODES, NO_FAULTS, FaultHistory, attribute

#: Consecutive exits with 75 (saved, wants a restart) without a new step, after which another
#: restart is pointless.
MOST_FRUITLESS = 5

#: Exit codes that become the run's own: restarting on the same nodes cannot help.
_FINAL_CODES = FATAL | {Exit.NODE, Exit.CAPACITY, Exit.FENCED}


@dataclass(frozen=True)
class WorkerEnd:
    """The end of one worker. `order` counts the ends in the order in which they were reported."""

    rank: int
    node: str
    code: int
    asked: bool  # it had been asked to stop
    order: int
    step: int | None = None
    log: str = ""
    tail: tuple[str, ...] = ()
    cause: str = ""  # kind of its failure, as the worker reported it
    error: str = ""


@dataclass(frozen=True)
class NodeLoss:
    """The loss of a node."""

    node: str
    reason: str


@dataclass(frozen=True)
class Request:
    """The request to end the run."""

    kind: Literal["cancelled", "stopped"]
    reason: str


@dataclass(frozen=True)
class EpochEnd:
    """The outcome of an epoch, once every worker is gone."""

    epoch: int
    world_size: int
    ends: tuple[WorkerEnd, ...]
    lost: tuple[NodeLoss, ...] = ()
    request: Request | None = None
    new_steps: bool = False  # a step beyond all earlier epochs was completed
    elastic: bool = False  # the run can continue with other nodes
    resize: str = ""  # reason for which all had to save and stop: nodes have joined, or will leave
    slow: Cause | None = None  # the straggler that a resize replaces with a spare
    fault: Cause | None = None  # the fault that the coordinator detected and ended the workers for


@dataclass(frozen=True)
class Budget:
    """The restart budget of a run. `limits` are the kinds of cause with a budget of their own."""

    max_restarts: int
    used: int = 0  # counted restarts of all causes
    fruitless: int = 0  # consecutive uncounted restarts without a new step
    limits: Mapping[str, int] = field(default_factory=dict)
    by_cause: Mapping[str, int] = field(default_factory=dict)  # counted restarts by kind

    def allows(self, kind: str) -> bool:
        """Returns whether a fault of this kind may be followed by a restart."""
        if kind in self.limits:
            return self.by_cause.get(kind, 0) < self.limits[kind]
        used_by_limited = sum(self.by_cause.get(limited, 0) for limited in self.limits)
        return self.used - used_by_limited < self.max_restarts

    def with_restart(self, kind: str) -> Budget:
        by_cause = {**self.by_cause, kind: self.by_cause.get(kind, 0) + 1}
        return replace(
            self,
            used=self.used + 1,
            fruitless=0,
            by_cause=by_cause,
        )

    def setting(self, kind: str) -> str:
        """Returns the configuration setting that limits restarts after faults of this kind."""
        if kind in self.limits:
            return f"max_restarts_by_cause.{kind}={self.limits[kind]}"
        return f"max_restarts={self.max_restarts}"


FinalState = Literal["done", "failed", "cancelled", "stopped"]


@dataclass(frozen=True)
class Decision:
    """What follows an epoch: with `again` the next epoch, else the end of the run with `code`."""

    again: bool
    state: FinalState | Literal["restarting"]
    reason: str
    budget: Budget
    code: int = 0
    counted: bool = False
    cause: Cause | None = None
    exclude: str | None = None  # the node that the next epoch must do without


def first_cause(ends: tuple[WorkerEnd, ...]) -> WorkerEnd | None:
    """Returns the end that explains the others, or None if no worker failed.

    When one worker dies, its peers fail in their collectives and exit with 75 or an error of their
    own, and their agents may report earlier. So workers that had not been asked to stop come first;
    among them a signal or an error comes before a 75, which may follow from a peer's end; then the
    order of the reports decides.
    """
    failed = [end for end in ends if end.code != 0]
    spontaneous = [end for end in failed if not end.asked]
    candidates = spontaneous or failed
    return min(
        candidates,
        key=lambda end: (end.code == Exit.RESTART, end.order),
        default=None,
    )


def cause_of(end: WorkerEnd, epoch: int) -> Cause:
    """Returns the cause of an epoch's end that the end of one worker makes."""
    ending = meaning(end.code)
    if end.code >= 0 and not ending.startswith("exit code"):
        ending = f"{ending} (exit {end.code})"
    text = f"rank {end.rank} on {end.node}: {ending}{_after_step(end)}"
    kind = "worker_exit"
    if end.cause in WORKER_CAUSES:
        kind = end.cause
        text = ": ".join(filter(None, (text, end.error)))
    return Cause(
        kind=kind,
        text=text,
        epoch=epoch,
        node=end.node,
        rank=end.rank,
        code=end.code,
        step=end.step,
        log=end.log,
        tail=list(end.tail),
    )


def _after_step(end: WorkerEnd) -> str:
    return f" after step {end.step}" if end.step is not None else ""


def restart(reason: str, budget: Budget, cause: Cause | None = None) -> Decision:
    """Returns the decision to restart on the nodes that are left, which is not counted."""
    return Decision(
        again=True,
        state="restarting",
        reason=reason,
        budget=budget,
        cause=cause,
    )


def decide(end: EpochEnd, budget: Budget, history: FaultHistory = NO_FAULTS) -> Decision:
    """Returns what follows an epoch, by the table of docs/protocol.md, "Decisions", row by row."""
    if _all_ended_with(end, 0):
        return Decision(
            again=False,
            state="done",
            code=0,
            reason="all workers are done",
            budget=budget,
        )
    first_failure = first_cause(end.ends)
    cause = end.fault
    if cause is None and first_failure:
        cause = cause_of(first_failure, end.epoch)
    if end.request is not None:
        return _after_request(end, end.request, budget, first_failure, cause)
    if end.lost:
        return _after_node_loss(end, budget)
    has_failed = first_failure and not first_failure.asked and first_failure.code != Exit.RESTART
    if end.resize and end.fault is None and not has_failed:
        if end.slow:
            return _restart_without(end.slow, end.resize, budget)
        return restart(end.resize, budget)
    if cause is None:  # only a lost node or a request can end an epoch like this
        reason = f"{end.world_size - len(end.ends)} workers are unaccounted for"
        cause = Cause(kind="internal", text=reason, epoch=end.epoch)
        return _end_run("failed", Exit.INTERNAL, reason, budget, cause)
    code = 1 if end.fault or first_failure is None else first_failure.code
    return _after_failure(end, cause, code, budget, history)


def _all_ended_with(end: EpochEnd, *codes: int) -> bool:
    complete = len(end.ends) == end.world_size
    return complete and all(worker.code in codes for worker in end.ends)


def _after_node_loss(end: EpochEnd, budget: Budget) -> Decision:
    loss = end.lost[0]
    cause = Cause(
        kind="node_lost",
        text=f"{loss.node}: {loss.reason}",
        epoch=end.epoch,
        node=loss.node,
    )
    if end.elastic:
        return restart(cause.text, budget, cause)
    return _end_run("failed", Exit.CAPACITY, cause.text, budget, cause)


def _after_request(
    end: EpochEnd,
    request: Request,
    budget: Budget,
    first_failure: WorkerEnd | None,
    cause: Cause | None,
) -> Decision:
    """Returns the end of a run that was requested; a fatal failure before the request counts."""
    is_fatal = first_failure and not first_failure.asked and first_failure.code in FATAL
    if first_failure and cause and end.fault is None and is_fatal:
        return _end_run("failed", first_failure.code, cause.text, budget, cause)
    if not end.ends:
        reason = f"{request.reason}; before any worker had started"
        return _end_run(request.kind, Exit.RESTART, reason, budget, None)
    if _all_ended_with(end, 0, Exit.RESTART):
        return _end_run(request.kind, Exit.RESTART, request.reason, budget, None)
    return _end_without_save(end, request, budget, cause)


def _end_without_save(
    end: EpochEnd,
    request: Request,
    budget: Budget,
    cause: Cause | None,
) -> Decision:
    """Returns the end of a run that was requested and in which not every worker saved.

    The decision names a worker that failed. One that was killed, or that does not handle signals,
    has not failed.
    """
    explanation = "not every worker saved"
    failed = [worker for worker in end.ends if worker.code and worker.code not in EXTERNAL_CODES]
    if failed:
        worst = min(failed, key=lambda worker: (not worker.asked, worker.order))
        cause = end.fault or cause_of(worst, end.epoch)
        conduct = "was asked to save and failed" if worst.asked else "failed"
        explanation = f"rank {worst.rank} on {worst.node} {conduct}: {meaning(worst.code)}"
        explanation += _after_step(worst)
    return _end_run(
        request.kind,
        Exit.RESTART,
        f"{request.reason}; {explanation}",
        budget,
        cause,
    )


def _after_failure(
    end: EpochEnd,
    cause: Cause,
    code: int,
    budget: Budget,
    history: FaultHistory,
) -> Decision:
    """Returns what follows a failure. `code` is the exit code of the first worker that failed."""
    if code == Exit.NODE and end.elastic:
        return _restart_without(cause, cause.text, budget)

    if cause.kind == "disk_full":  # earlier checkpoints are whole; a restart makes no room
        reason = f"{cause.text}; make room and resume"
        return _end_run("stopped", Exit.RESTART, reason, budget, cause)

    if code in _FINAL_CODES:
        return _end_run("failed", code, cause.text, budget, cause)

    if code == Exit.RESTART:
        fruitless = 0 if end.new_steps else budget.fruitless + 1
        budget = replace(budget, fruitless=fruitless)
        if fruitless > MOST_FRUITLESS:
            reason = f"{cause.text}; {MOST_FRUITLESS} restarts in a row without a new step"
            return _end_run("stopped", Exit.RESTART, reason, budget, cause)
        return restart(cause.text, budget, cause)

    attribution = attribute(cause, history)
    if attribution.at_fault == "data":
        return _end_run("failed", Exit.CONFIG, attribution.reason, budget, cause)
    if attribution.at_fault == "node":
        if end.elastic:
            return _restart_without(cause, attribution.reason, budget)
        return _end_run("failed", Exit.NODE, attribution.reason, budget, cause)
    if not budget.allows(cause.kind):
        return _end_without_budget(cause, code, budget)
    budget = budget.with_restart(cause.kind)
    return replace(restart(cause.text, budget, cause), counted=True)


def _end_without_budget(cause: Cause, code: int, budget: Budget) -> Decision:
    """Returns the end of a run whose failure the restart budget no longer allows."""
    reason = cause.text
    if budget.by_cause or budget.used:
        reason += f"; {budget.setting(cause.kind)} used up"
    exit_code = Exit.USER
    if cause.kind == "non_finite":
        exit_code = Exit.CONFIG
    elif code == Exit.INTERNAL:
        exit_code = Exit.INTERNAL
    return _end_run("failed", exit_code, reason, budget, cause)


def _restart_without(cause: Cause, reason: str, budget: Budget) -> Decision:
    """Returns the decision to restart on other nodes, excluding the node in `cause`."""
    return replace(restart(reason, budget, cause), exclude=cause.node)


def _end_run(
    state: FinalState,
    code: int,
    reason: str,
    budget: Budget,
    cause: Cause | None,
) -> Decision:
    return Decision(
        again=False,
        state=state,
        code=int(code),
        reason=reason,
        budget=budget,
        cause=cause,
    )
