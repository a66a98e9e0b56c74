"""Profiles steps: memory by category at intervals, the timeline of the first steps, choices of
experts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv, trace_file
from trainer.worker.reporter import Reporter

from .choices import ChoiceRecord
from .memory import StepMemory
from .trace import StepTrace

if TYPE_CHECKING:
    from trainer.engine import Engine


class Profile:
    """Profiles the steps of an engine; other steps cost nothing."""

    def __init__(
        self,
        plan: Plan,
        env: WorkerEnv,
        device: torch.device,
        engine: Engine,
        reporter: Reporter,
    ):
        self.every = plan.job.metrics.memory_every_steps
        self.traced = plan.job.metrics.trace_steps
        self._requested = self.traced
        self.engine = engine
        self.reporter = reporter
        self.memory = StepMemory.of_engine(engine)
        path = trace_file(env.run_dir, env.rank)
        about = {"plan": plan.hash, "epoch": env.epoch}
        self.trace = StepTrace(path, env.rank, device, self._failed, about)
        self.choices = ChoiceRecord(
            plan,
            env,
            engine,
            lambda error: reporter.event("record_failed", error=str(error)),
        )

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[dict[str, int]]:
        """Profiles optimizer step `number`. The yielded dict has bytes by category afterwards, if
        the step is measured."""
        with self.choices.step(number), self._measure(number) as measured:
            yield measured

    @contextlib.contextmanager
    def _measure(self, number: int) -> Iterator[dict[str, int]]:
        measured: dict[str, int] = {}
        traced = self.traces(number)
        if not traced and not self._measures(number):
            yield measured
            return
        engine = self.engine
        with contextlib.ExitStack() as around:
            if traced:
                engine.counter.trace = self.trace
                around.callback(setattr, engine.counter, "trace", None)
                around.enter_context(
                    self.trace.step(
                        number,
                        self.memory.points,
                        engine.pipeline.action_times,
                        engine.timer,
                    )
                )
            around.enter_context(self.memory.measure(measured))
            yield measured

    def watches(self, number: int) -> bool:
        """Whether step `number` is profiled on any rank, also if the trace of this rank has
        failed."""
        return number <= self._requested or self._measures(number)

    def _measures(self, number: int) -> bool:
        return bool(self.every and number % self.every == 0)

    def traces(self, number: int) -> bool:
        """Whether the timeline of step `number` is recorded."""
        return number <= self.traced

    def _failed(self, error: OSError) -> None:
        """Stops tracing on a full disk, but not the run."""
        self.traced = 0
        self.reporter.event("trace_failed", error=str(error))
