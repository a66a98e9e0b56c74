"""The report of a finished step: its speed, bytes, seconds and memory, from what the step's result
and the plan say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

from orchestrator.plan import Plan
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.plan.flops import hardware_flops_per_token, model_flops_per_token
from trainer.engine import Engine
from trainer.worker.reporter import Reporter

from .step_result import StepResult, StepTimes


@dataclass(frozen=True, kw_only=True)
class EnqueuedStep:
    """A step that is enqueued and not yet reported."""

    number: int
    samples_before: int  # samples consumed before the step, globally
    step_samples: int  # samples of the step, globally
    valid_tokens: int
    lr: float
    start: float  # perf_counter
    boundary_s: float  # seconds that the step waited at its boundary
    fingerprint: str  # of the step's samples
    memory_bytes: dict[str, int]
    terms: tuple[str, ...]  # names of the loss terms in the result
    result: StepResult


class StepReports:
    """Reports finished steps in order, each with its wall time."""

    def __init__(self, plan: Plan, engine: Engine, reporter: Reporter):
        self.plan = plan
        self.engine = engine
        self.reporter = reporter
        train = plan.job.train
        self._model_flops = model_flops_per_token(plan.model, train.seq_len)
        self._hardware_flops = hardware_flops_per_token(
            plan.model,
            train.seq_len,
            train.recompute,
            train.recompute_layers,
            bool(train.recompute_latents),
        )
        self._reported = 0.0  # perf_counter at the end of the latest report

    def report(
        self,
        step: EnqueuedStep,
        loss: float | None,
        terms: dict[str, float],
        norm: float,
    ) -> None:
        """Reports a finished step. Its seconds begin where those of the previous step ended, if
        that was later than its start."""
        now = perf_counter()
        times = step.result.times()
        seconds = now - max(step.start, self._reported)
        self._reported = now
        tokens = step.step_samples * self.plan.job.train.seq_len
        own_s = None
        bubble_ratio = None
        if times.measured:
            own_s = max(0.0, seconds - waited_seconds(step, times))
            bubble_ratio = times.idle_s / seconds if self.plan.parallel.pp > 1 else None
        mfu, hfu = self._utilisation(tokens, seconds)
        self.reporter.step(
            step=step.number,
            samples=step.samples_before + step.step_samples,
            tokens=tokens,
            fingerprint=step.fingerprint,
            step_s=seconds,
            loss=loss,
            loss_terms=terms,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=step.lr,
            phase_s=times.phase_s,
            own_s=own_s,
            bubble_ratio=bubble_ratio,
            comm_bytes=step.result.comm_bytes,
            comm_s=times.comm_s,
            expert_bytes=step.result.level_bytes,
            expert_s=times.level_s,
            memory_bytes=step.memory_bytes,
            mfu=mfu,
            experts=self._expert_loads(step.result),
            hfu=hfu,
        )

    def _utilisation(self, tokens: int, seconds: float) -> tuple[float | None, float | None]:
        """Returns (MFU, HFU): the share of the GPUs' peak that the model's FLOPs take, and that of
        all FLOPs, recomputed ones included. None for a GPU without a known peak."""
        plan = self.plan
        peak = plan.cluster.gpu.peak_flops.get(plan.job.train.precision)
        if not peak:
            return None, None
        per_flop = tokens / (seconds * plan.parallel.world_size * peak)
        return per_flop * self._model_flops, per_flop * self._hardware_flops

    def _expert_loads(self, result: StepResult) -> dict[str, ExpertLoad]:
        """Returns the loads of this rank's layers, if they were sampled and this rank reports
        them."""
        table = result.table()
        if not table or not self.engine.reports_expert_loads:
            return {}
        return self.engine.part.expert_meter.loads(table)


def waited_seconds(step: EnqueuedStep, times: StepTimes) -> float:
    """Seconds of a step in which the rank waited for other ranks or for a checkpoint."""
    checkpoint_s = times.phase_s.get("checkpoint", 0.0)
    return step.boundary_s + sum(times.comm_s.values()) + checkpoint_s
