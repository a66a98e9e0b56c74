"""The record that the run folder keeps of a run's Job, and the run's true state from record and
cluster together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import msgspec

from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit
from orchestrator.run.state import Cause, RunState, finish

FinalPhase = Literal["done", "failed", "cancelled", "stopped"]

if TYPE_CHECKING:
    from .phases import RunStatus


class KubernetesRecord(Frozen):
    """backend.json: where the run's objects are. It is written before they are sent."""

    context: str | None
    namespace: str
    kind: str  # Job or JobSet
    name: str
    submission: str
    submitted_at: float
    generation: int = 0
    sent: bool = False  # the API server has accepted the last of them
    #: name of the TrainRun whose controller manages the run; "": this machine's `orch` does
    train_run: str = ""


def verdict(
    state: RunState,
    status: RunStatus,
    cancel_asked: bool,
    sent: bool = True,
) -> RunState:
    """Returns the run's true state: the cluster knows whether it is active, the last status line
    how its program is doing.

    `state` is the coordinator's, as old as the last log that was read. Pure.
    """
    if status.over:
        return _ended(state, status, cancel_asked, sent)
    if status.phase == "running":
        if state.state == "running":
            return state
        if state.state in ("starting", "restarting", "stopping"):
            return state if state.reason else _replace(state, reason=status.reason)
        if state.state == "done":  # the program has ended, its pods have not
            return _replace(
                state,
                state="stopping",
                exit_code=None,
                ended_at=None,
            )
    phase = "starting" if status.phase == "running" else status.phase
    if phase == "starting" and state.epoch >= 0:
        phase = "restarting"
    return _replace(
        state,
        state=phase,
        exit_code=None,
        reason=status.reason,
        ended_at=None,
    )


def _ended(
    state: RunState,
    status: RunStatus,
    cancel_asked: bool,
    sent: bool,
) -> RunState:
    if cancel_asked and status.phase != "done":
        return _final(state, "cancelled", Exit.RESTART, "cancelled by the user")
    if state.is_final and (status.phase == "stopped" or state.state == status.phase):
        return state
    if status.phase == "stopped" and not sent:
        return _replace(state, reason="its objects were rendered; the cluster has not seen them")
    phase = cast(FinalPhase, status.phase)  # a run that is over is in one of these
    exit = Exit.CAPACITY if status.exit is None else status.exit
    return _final(state, phase, exit, status.reason)


def _final(state: RunState, phase: FinalPhase, exit: Exit, reason: str) -> RunState:
    if exit == Exit.DONE or phase == "cancelled":
        return finish(state, phase, exit, reason, None)
    from_cluster = Cause(
        kind="scheduler",
        text=reason,
        epoch=state.epoch,
        code=int(exit),
    )
    return finish(
        state,
        phase,
        exit,
        reason,
        state.cause or from_cluster,
    )


def _replace(run: RunState, /, **changes: object) -> RunState:
    return msgspec.structs.replace(run, **changes)
