"""What the run folder keeps of a run's Job, and a run's true state when file and cluster are put
together."""

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
    """backend.json: where the run's objects are. Written before they are sent."""

    context: str | None
    namespace: str
    kind: str  # Job or JobSet
    name: str
    submission: str
    submitted_at: float
    generation: int = 0
    sent: bool = False  # the API server has taken the last of them
    # name of the TrainRun whose controller looks after it; "": this machine's `orch` does
    train_run: str = ""


def verdict(state: RunState, what: RunStatus, cancel_asked: bool, sent: bool = True) -> RunState:
    """The run's true state: the cluster says whether it is active, the last status line how its
    program fares.

    `state` is the coordinator's, as old as the last log that was read. Pure.
    """
    if what.over:
        return _ended(state, what, cancel_asked, sent)
    if what.phase == "running" and state.state in ("starting", "running", "restarting", "stopping"):
        return (
            state if state.reason or state.state == "running" else _replace(state, reason=what.text)
        )
    if (
        what.phase == "running" and state.state == "done"
    ):  # the program has ended, its pods have not
        return _replace(state, state="stopping", exit_code=None, ended_at=None)
    phase = "starting" if what.phase == "running" else what.phase
    if phase in ("starting", "pending") and state.epoch >= 0:
        phase = "restarting" if phase == "starting" else phase
    return _replace(state, state=phase, exit_code=None, reason=what.text, ended_at=None)


def _ended(state: RunState, what: RunStatus, cancel_asked: bool, sent: bool) -> RunState:
    if cancel_asked and what.phase != "done":
        return _final(state, "cancelled", Exit.RESTART, "cancelled by the user")
    if state.is_final and (what.phase == "stopped" or state.state == what.phase):
        return state
    if what.phase == "stopped" and not sent:
        return _replace(state, reason="its objects were rendered; the cluster has not seen them")
    phase = cast(FinalPhase, what.phase)  # a run that is over has one of these
    return _final(state, phase, Exit.CAPACITY if what.exit is None else what.exit, what.text)


def _final(state: RunState, phase: FinalPhase, exit: Exit, text: str) -> RunState:
    cause: Cause | None = state.cause or Cause(
        kind="scheduler", text=text, epoch=state.epoch, code=int(exit)
    )
    cause = None if exit == Exit.DONE or phase == "cancelled" else cause
    return finish(state, phase, exit, text, cause)


def _replace(run: RunState, /, **changes: object) -> RunState:
    return msgspec.structs.replace(run, **changes)
