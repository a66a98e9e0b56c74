"""One fault in one run: do it, and watch until steps follow each other again, or the run has ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from orchestrator.backends.base import Backend
from orchestrator.errors import OrchError
from orchestrator.observe.goodput.run_timeline import NOTICED
from orchestrator.observe.timeline import Event, Step, StepFollower, read_events
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest
from orchestrator.run.state import RunState

from .faults import KINDS, Shot, refusal, restarts_left, victim

_LOOK_S = 0.05
_STEADY_STEPS = 2  # of a life, before it is hit
_USUAL_STEPS = 16  # before one of its workers is made slow: slower than what?
#: Events that tell of a fault that need not end an epoch, beside those that tell of its end.
_TOLD = (*NOTICED, "checkpoint_failed", "checkpoint_rejected", "straggler")


class Trial(msgspec.Struct, kw_only=True):
    """What came of one shot. Seconds from the injection; None: it did not happen."""

    fault: str
    position: str
    node: str
    rank: int
    at: float  # Unix seconds
    epoch: int  # that was hit
    ok: bool = False
    noticed_s: float | None = None
    stepping_s: float | None = None  # until the first step after it began
    lost_steps: int | None = None  # done again
    problem: str = ""


class Done(NamedTuple):
    """A fault that was injected."""

    at: float  # Unix seconds just before, by the clock of where it was done
    take_back: Callable[[], None]  # may be called again


class Targets(Protocol):
    """What can be hit: on this machine, or inside a job."""

    def check(self, fault: str) -> None:
        """OrchError (64, 76) for a fault that this run cannot have."""

    def inject(self, fault: str, node: str, rank: int, for_s: float, pick: float) -> Done:
        """Do it."""


class Range:
    """The run as the one who shoots sees it."""

    def __init__(self, folder: RunFolder, backend: Backend, request: LaunchRequest, limit_s: float):
        self.folder, self.request, self.limit_s = folder, request, limit_s
        self._backend = backend
        self._lead = StepFollower(folder)

    @property
    def pods_come_back(self) -> bool:
        """A node that is lost costs a life of the run, and is there again."""
        return self._backend.replaces_lost_nodes

    @property
    def bears_losses(self) -> bool:
        return bool(self.request.sizes) or self.pods_come_back

    def state(self) -> RunState:
        return self._backend.state(self.folder)

    def marks(self, state: RunState) -> list[Event]:
        """What the run's agents noted. Where only its state comes out of the cluster, the ends of its epochs."""
        ends = [Event("epoch_stops", epoch.ended_at, epoch.epoch) for epoch in state.epochs if epoch.ended_at]
        return read_events(self.folder, state.nodes) or ends

    def steps(self, state: RunState) -> list[Step]:
        return self._lead.read(state.nodes)

    def wait_steady(self, shot: Shot) -> tuple[RunState, Step, tuple[str, int]]:
        """Until the run steps and has a victim that it can spare; its state, last step, and that (node, rank).

        OrchError (76) when it has none in time, or has ended.
        """
        end = time.monotonic() + self.limit_s
        while True:
            state = self.state()
            if state.is_final:
                raise OrchError(f"run {state.run_id} has ended: {state.state}, {state.reason}", Exit.CAPACITY)
            ranks = {name: node.ranks for name, node in state.nodes.items() if node.state == "running"}
            mine = [step for step in self.steps(state) if step.epoch == state.epoch]
            chosen = victim(shot, ranks, state.writer)
            why = self._why_not(state, shot.fault)
            if chosen is None:
                why = why or f"no node is {shot.position!r}: {', '.join(ranks) or 'none runs'}"
            slows = KINDS[shot.fault].slows
            steady = len(mine) >= (_USUAL_STEPS if slows else _STEADY_STEPS)
            if slows and state.slow:  # what is slow already cannot be noticed anew
                why = why or f"{', '.join(state.slow)} is slow without it"
            if state.state == "running" and steady and not why:
                return state, mine[-1], chosen
            if time.monotonic() > end or "used up" in why:
                text = why or f"no steps, it is {state.state}"
                raise OrchError(f"run {state.run_id}: {text}", Exit.CAPACITY)
            time.sleep(_LOOK_S)

    def shoot(self, shot: Shot, targets: Targets, for_s: float) -> Trial:
        """OrchError (76) when the run cannot take the shot; a run that does not get over it is no error."""
        state, last, (node, rank) = self.wait_steady(shot)
        targets.check(shot.fault)
        about = {"fault": shot.fault, "position": shot.position, "node": node, "rank": rank}
        trial = Trial(**about, at=time.time(), epoch=state.epoch)
        done = targets.inject(shot.fault, node, rank, for_s, shot.pick)
        trial.at = done.at
        try:
            self._watch(trial, last.step, for_s if KINDS[shot.fault].lasts else 0.0, done.take_back)
        finally:
            done.take_back()
        return trial

    def _watch(self, trial: Trial, before: int, for_s: float, take_back: Callable[[], None]) -> None:
        """Until it is over. What the run says is held against its clocks; on ours only spans are counted."""
        began, taken_back, lifted = time.monotonic(), False, trial.at + for_s
        kind, silence_s = KINDS[trial.fault], self.request.policy.heartbeat_timeout_s
        # a fault that is over may have been too short to be noticed: later than that, nobody will
        same_life = lifted if not kind.restarts else lifted + silence_s if kind.lasts else math.inf
        while True:
            state = self.state()
            if kind.lasts and time.monotonic() >= began + for_s and not taken_back:
                take_back()
                taken_back = True
            steps = self.steps(state)
            fill(trial, steps, self.marks(state))
            if state.is_final:
                trial.problem = f"the run has ended: {state.state}, {state.reason}"
                return
            anew = [step for step in steps if step.epoch > trial.epoch and step.at > lifted]
            if len(anew) >= _STEADY_STEPS or any(step.at > same_life and step.step > before for step in steps):
                trial.ok = True
                return
            if time.monotonic() > began + self.limit_s:
                trial.problem = f"no steps within {self.limit_s:g} s; the run is {state.state}"
                return
            time.sleep(_LOOK_S)

    def _why_not(self, state: RunState, fault: str) -> str:
        limits = self.request.policy.max_restarts_by_cause
        seated = sum(1 for node in state.nodes.values() if node.state == "running" and node.ranks)
        here = sum(1 for node in state.nodes.values() if node.state in ("running", "joined"))
        return refusal(
            fault,
            restarts_left=restarts_left(fault, state.max_restarts, limits, state.restarts, state.restarts_by_cause),
            elastic=self.bears_losses,
            spare_nodes=1 if self.pods_come_back else max(here, seated) - min(self.request.sizes, default=0),
        )


def fill(trial: Trial, steps: Sequence[Step], marks: Sequence[Event]) -> None:
    """What the run's own records say about it by now."""
    after = [mark for mark in marks if mark.name in _TOLD and mark.at >= trial.at and not _by_wish(mark)]
    signs = [mark.at for mark in after if mark.name != "straggler" or mark.on == trial.node]
    trial.noticed_s = min(signs) - trial.at if signs else None
    later = [step for step in steps if step.epoch > trial.epoch]
    if later:
        first = min(later, key=lambda step: (step.epoch, step.step))
        done = max((step.step for step in steps if step.epoch == trial.epoch), default=first.step - 1)
        trial.stepping_s = max(0.0, first.at - first.step_s - trial.at)
        trial.lost_steps = max(0, done - (first.step - 1))
    else:
        trial.lost_steps = 0


def _by_wish(mark: Event) -> bool:
    """A worker that ends well, or because it was told to, is no sign of trouble."""
    return mark.name == "worker_ended" and (mark.asked or not mark.code)
