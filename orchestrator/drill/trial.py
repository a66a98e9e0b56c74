"""One trial: injects a fault into a run, and watches until the run steps again or has ended; and
the score of many trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from orchestrator.backends.base import Backend
from orchestrator.errors import OrchError
from orchestrator.observe.goodput.run_timeline import NOTICED
from orchestrator.observe.timeline import Event, Step, StepFollower, read_events
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import LaunchRequest
from orchestrator.run.state import RunState

from .faults import KINDS, Injection, refusal, restarts_left, victim
from .targets import Targets

_POLL_S = 0.05
_STEADY_STEPS = 2  # steps of an attempt before a fault is injected
_USUAL_STEPS = 16  # steps before a worker is slowed: its usual speed must be known
#: Events that report a fault: those that end an epoch, and those of faults that need not end one.
_SIGNS = (*NOTICED, "checkpoint_failed", "checkpoint_rejected", "straggler")


class Trial(msgspec.Struct, kw_only=True):
    """The outcome of one injection. Seconds count from it; None: it did not happen."""

    fault: str
    position: str
    node: str
    rank: int
    at: float  # Unix seconds
    epoch: int  # the epoch that was hit
    ok: bool = False
    noticed_s: float | None = None
    stepping_s: float | None = None  # until the first step of a later epoch began
    lost_steps: int | None = None  # steps that were recomputed
    problem: str = ""


class DrilledRun:
    """A run that faults are injected into."""

    def __init__(
        self,
        folder: RunFolder,
        backend: Backend,
        request: LaunchRequest,
        limit_s: float,
    ):
        self.folder = folder
        self.request = request
        self.limit_s = limit_s
        self._backend = backend
        self._lead = StepFollower(folder)

    @property
    def replaces_lost_nodes(self) -> bool:
        return self._backend.replaces_lost_nodes

    @property
    def survives_lost_nodes(self) -> bool:
        return bool(self.request.sizes) or self.replaces_lost_nodes

    def state(self) -> RunState:
        return self._backend.state(self.folder)

    def marks(self, state: RunState) -> list[Event]:
        """Returns the events that the run's agents recorded. If only its state leaves the
        cluster, the ends of its epochs."""
        ends = [
            Event("epoch_stops", epoch.ended_at, epoch.epoch)
            for epoch in state.epochs
            if epoch.ended_at
        ]
        return read_events(self.folder, state.nodes) or ends

    def steps(self, state: RunState) -> list[Step]:
        return self._lead.read(state.nodes)

    def untold(self) -> str:
        """Returns why no step of a program may ever be seen; "" once a step was seen, and for
        workers that always report steps."""
        worker = self.request.worker
        if worker.bundled or self.steps(self.state()):
            return ""
        if worker.pattern:
            return (
                "metrics.pattern has found no step in what it prints, and a drill measures by steps"
            )
        return (
            "it has reported no step, and a drill measures by steps: orch_report or metrics.pattern"
        )

    def wait_steady(self, injection: Injection) -> tuple[RunState, Step, tuple[str, int]]:
        """Waits until the run steps and has a victim that it can spare; returns its state, its last
        step, and that (node, rank).

        OrchError (76) if it has none in time, or has ended.
        """
        end = time.monotonic() + self.limit_s
        while True:
            state = self.state()
            if state.is_final:
                raise OrchError(
                    f"run {state.run_id} has ended: {state.state}, {state.reason}", Exit.CAPACITY
                )
            ranks = {
                name: node.ranks for name, node in state.nodes.items() if node.state == "running"
            }
            epoch_steps = [step for step in self.steps(state) if step.epoch == state.epoch]
            chosen = victim(injection, ranks, state.writer)
            obstacle = self._why_not(state, injection.fault)
            if chosen is None:
                obstacle = (
                    obstacle
                    or f"no node is {injection.position!r}: {', '.join(ranks) or 'none runs'}"
                )
            slows = KINDS[injection.fault].slows
            steady = len(epoch_steps) >= (_USUAL_STEPS if slows else _STEADY_STEPS)
            if slows and state.slow:  # a second slow worker would not be detected
                obstacle = obstacle or f"{', '.join(state.slow)} is slow without it"
            if chosen is not None and state.state == "running" and steady and not obstacle:
                return state, epoch_steps[-1], chosen
            if time.monotonic() > end or "used up" in obstacle:
                problem = obstacle or self.untold() or f"no steps, it is {state.state}"
                raise OrchError(f"run {state.run_id}: {problem}", Exit.CAPACITY)
            time.sleep(_POLL_S)

    def run_trial(self, injection: Injection, targets: Targets, for_s: float) -> Trial:
        """Runs one trial. OrchError (76) if the run cannot spare what the fault takes. A run
        that the fault ends is a failed trial."""
        state, last, (node, rank) = self.wait_steady(injection)
        targets.check(injection.fault)
        trial = Trial(
            fault=injection.fault,
            position=injection.position,
            node=node,
            rank=rank,
            at=time.time(),
            epoch=state.epoch,
        )
        injected = targets.inject(injection.fault, node, rank, for_s, injection.pick)
        trial.at = injected.at
        try:
            self._watch(
                trial,
                last.step,
                for_s if KINDS[injection.fault].lasts else 0.0,
                injected.undo,
            )
        finally:
            injected.undo()
        return trial

    def _watch(
        self,
        trial: Trial,
        last_step: int,
        for_s: float,
        undo: Callable[[], None],
    ) -> None:
        """Waits for the end of the trial. Times of the run are compared with its own clocks;
        this process's clock measures durations only."""
        began = time.monotonic()
        undone = False
        ended = trial.at + for_s
        kind = KINDS[trial.fault]
        silence_s = self.request.policy.heartbeat_timeout_s
        # A fault that is over may have been too short to be detected; after `silence_s` it is not
        # detected any more, and steps of the same attempt count.
        same_attempt = math.inf
        if not kind.restarts:
            same_attempt = ended
        elif kind.lasts:
            same_attempt = ended + silence_s
        while True:
            state = self.state()
            if kind.lasts and time.monotonic() >= began + for_s and not undone:
                undo()
                undone = True
            steps = self.steps(state)
            measure(trial, steps, self.marks(state))
            if state.is_final:
                trial.problem = f"the run has ended: {state.state}, {state.reason}"
                return
            new_steps = [step for step in steps if step.epoch > trial.epoch and step.at > ended]
            continued = any(step.at > same_attempt and step.step > last_step for step in steps)
            if len(new_steps) >= _STEADY_STEPS or continued:
                trial.ok = True
                return
            if time.monotonic() > began + self.limit_s:
                trial.problem = f"no steps within {self.limit_s:g} s; the run is {state.state}"
                return
            time.sleep(_POLL_S)

    def _why_not(self, state: RunState, fault: str) -> str:
        limits = self.request.policy.max_restarts_by_cause
        nodes = state.nodes.values()
        with_ranks = sum(1 for node in nodes if node.state == "running" and node.ranks)
        present = sum(1 for node in nodes if node.state in ("running", "joined"))
        spare_nodes = max(present, with_ranks) - min(self.request.sizes, default=0)
        budget = restarts_left(
            fault,
            state.max_restarts,
            limits,
            state.restarts,
            state.restarts_by_cause,
        )
        return refusal(
            fault,
            restarts_left=budget,
            elastic=self.survives_lost_nodes,
            spare_nodes=1 if self.replaces_lost_nodes else spare_nodes,
        )


def measure(trial: Trial, steps: Sequence[Step], marks: Sequence[Event]) -> None:
    """Fills in when the fault was detected, when steps continued and how many were lost, from
    the run's own records."""
    later_signs = [
        mark
        for mark in marks
        if mark.name in _SIGNS and mark.at >= trial.at and not _is_intended(mark)
    ]
    signs = [mark.at for mark in later_signs if mark.name != "straggler" or mark.on == trial.node]
    trial.noticed_s = min(signs) - trial.at if signs else None
    later = [step for step in steps if step.epoch > trial.epoch]
    if later:
        first = min(later, key=lambda step: (step.epoch, step.step))
        done = max(
            (step.step for step in steps if step.epoch == trial.epoch),
            default=first.step - 1,
        )
        trial.stepping_s = max(0.0, first.at - first.step_s - trial.at)
        trial.lost_steps = max(0, done - (first.step - 1))
    else:
        trial.lost_steps = 0


def _is_intended(mark: Event) -> bool:
    """Tells whether a worker ended well, or because it was asked to: that is not a sign of a
    fault."""
    return mark.name == "worker_ended" and (mark.asked or not mark.code)


# ------------------------------------------------------------------------------------------ score


def quantile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)] if values else None


def score(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """Returns a row for each fault and position, in the order in which they first came."""
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.fault, trial.position), []).append(trial)
    return [
        {"fault": fault, "position": position, **_row(trials_of_row)}
        for (fault, position), trials_of_row in rows.items()
    ]


def _row(trials: list[Trial]) -> dict[str, Any]:
    recovered = [trial for trial in trials if trial.ok]
    row: dict[str, Any] = {
        "trials": len(trials),
        "recovered": len(recovered),
        "rate": len(recovered) / len(trials),
    }
    for name in ("noticed_s", "stepping_s"):
        values = [value for trial in recovered if (value := getattr(trial, name)) is not None]
        row[name] = {
            "p50": quantile(values, 0.5),
            "p95": quantile(values, 0.95),
            "max": max(values, default=None),
        }
    lost = [trial.lost_steps for trial in recovered if trial.lost_steps is not None]
    row["lost_steps"] = {"p50": quantile(lost, 0.5), "max": max(lost, default=None)}
    row["problems"] = [trial.problem for trial in trials if trial.problem]
    return row
