"""What happens in a run, as typed values in the order in which it happens: what `orch submit
--follow` prints."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.plan.document import Frozen
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import Cause, Phase, RunState

from .timeline import StepLine, StepLines


class StateUpdate(Frozen):
    """The run has another state, or the same one in a new epoch."""

    state: Phase
    epoch: int  # -1 before the workers have started
    reason: str | None = None


class StepUpdate(Frozen):
    """A step was done. After a restart, steps that were lost are done again in a later epoch."""

    epoch: int
    step: int  # 1-based: steps completed
    steps: int | None  # of the whole run, if it is known
    at: float  # Unix seconds of the report
    step_s: float
    tokens: int  # of this step, over all ranks
    loss: float | None = None


class FaultUpdate(Frozen):
    """The first cause of a restart or of the end. `next_epoch` is the epoch that follows; None if
    the run ends."""

    cause: Cause
    next_epoch: int | None = None


class EndUpdate(Frozen):
    """The run has ended. It is the last update."""

    state: RunState


Update = StateUpdate | StepUpdate | FaultUpdate | EndUpdate


class Updates:
    """The updates of one run, from the first epoch of its present attempt on."""

    def __init__(self, folder: RunFolder):
        self._lines = StepLines(folder)
        self._held: dict[tuple[int, int], list[StepLine]] = {}  # (epoch, step) -> reports
        self._last_step_of: dict[int, int] = {}  # epoch -> last step that was returned
        self._last_state: StateUpdate | None = None
        self._last_fault_epoch = -1

    def read(self, state: RunState) -> Iterator[Update]:
        """Yields what is new. The caller has read `state` before this call."""
        steps = self._read_steps(state)
        for ended, successor in state.ended_epochs(self._last_fault_epoch):
            self._last_fault_epoch = ended.epoch
            yield from (step for step in steps if step.epoch <= ended.epoch)
            steps = [step for step in steps if step.epoch > ended.epoch]
            if ended.cause:
                yield FaultUpdate(cause=ended.cause, next_epoch=successor.epoch)
        state_update = StateUpdate(
            state=state.state,
            epoch=state.epoch,
            reason=state.reason,
        )
        if state_update != self._last_state and not state.is_final:
            self._last_state = state_update
            yield state_update
        yield from steps
        if state.is_final and state.cause:
            yield FaultUpdate(cause=state.cause)

    def _read_steps(self, state: RunState) -> list[StepUpdate]:
        """Returns the new steps, each as its lowest rank reports it, with the loss of any rank that
        has it.

        A step without a loss is held for one call, with those after it: the ranks that know the
        loss may report a moment later.
        """
        reports = dict(self._held)
        for line in self._lines.read(state.nodes):
            if line.epoch < state.first_epoch:
                continue
            if line.step > self._last_step_of.get(line.epoch, -1):
                key = line.epoch, line.step
                reports[key] = [*reports.get(key, []), line]
        held = self._held
        self._held = {}
        updates = []
        for key in sorted(reports):
            update = _step_update(state, reports[key])
            is_new = key not in held and update.epoch >= state.epoch and not state.is_final
            if self._held or (is_new and update.loss is None):
                self._held[key] = reports[key]
                continue
            self._last_step_of[update.epoch] = update.step
            updates.append(update)
        return updates


def _step_update(state: RunState, reports: list[StepLine]) -> StepUpdate:
    lead = min(reports, key=lambda report: report.rank)
    losses = [report.loss for report in reports if report.loss is not None]
    steps = state.summary.get("steps")
    return StepUpdate(
        epoch=lead.epoch,
        step=lead.step,
        steps=steps if isinstance(steps, int) else None,
        at=lead.at,
        step_s=lead.step_s,
        tokens=lead.tokens,
        loss=next(iter(losses), None),
    )
