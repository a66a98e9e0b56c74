"""Runs a step of micro-batches through this rank's stages in the order of the schedule.

With a single pipeline rank this is plain gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from orchestrator.plan import Plan
from orchestrator.plan.schedules import (
    Action,
    Costs,
    Kind,
    Schedule,
    costs_of,
    lower,
    lower_to_batches,
    receive_early,
    schedule_of,
)
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.comm.timers import PhaseTimer
from trainer.model.loss import LossTerms

from .action_times import ActionTimes
from .split import DeferredWeightGrad, DeferredWeightGrads, OnGrad, install
from .transfer import Transfers
from .turns import Turns


class Batch(Protocol):
    """The fields of a micro-batch that the pipeline itself reads; stages read the others."""

    @property
    def targets(self) -> Tensor: ...


class Pipeline:
    """Executes one schedule on one rank.

    A stage is called as `stage(hidden or None, micro_batch)` and returns hidden states, or logits
    if it is the last. Only the autograd graph holds activations from a stage's forward to its
    backward: outputs are freed as soon as they are sent, so a rank holds the activations that
    `peak_in_flight` counts.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        mesh: Mesh,
        counter: CommCounter,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_grad: OnGrad | None = None,
        timer: PhaseTimer | None = None,
        costs: Costs | None = None,
        compiled: bool = False,
        terms: LossTerms | None = None,
    ):
        """`stages`: those of `schedule.stages_of(pp coordinate)`, in that order. `loss(logits,
        targets)` returns a sum.

        `shape`, `dtype`: those of the hidden states between stages. `on_grad(param)` is called for
        each weight gradient that a split backward adds to `param.grad`; all other gradients arrive
        through autograd and its hooks. `terms`: the terms that the stages add to the loss. `costs`:
        as in `lower`; if they say so, a forward and the whole backward of another stage behind it
        run as one, each during the other's communication (`turns`).
        """
        rank = mesh.coord.pp
        device = torch.device(device)
        self.rank = rank
        self.loss = loss
        self.device = device
        self.terms = terms or LossTerms()
        self.stages = _numbered_stages(schedule, rank, stages)
        self.transfers = Transfers(
            schedule,
            mesh,
            counter,
            shape=tuple(shape),
            dtype=dtype,
            device=device,
        )
        self.action_times = ActionTimes(device)
        self._phase = timer.phase if timer else _no_phase
        self._timer = timer
        self.turns = Turns(device)
        #: Whether no two actions of this step run as one, for observers of operators, which see
        #: those of one thread. It must be equal on all ranks, which otherwise start collectives in
        #: different orders.
        self.one_by_one = False
        counter.before_wait = self.turns.pass_on
        self.weight_grads = DeferredWeightGrads(on_grad)
        if schedule.splits_backward:
            install(stages, self.weight_grads, compiled)
        self._saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
        self._deferred: dict[tuple[int, int], list[DeferredWeightGrad]] = {}
        self._micro_batches: Sequence[Batch] = ()
        self._total: Tensor
        self._scale: Tensor
        self._costs = costs
        self.set_schedule(schedule)

    def set_schedule(self, schedule: Schedule) -> None:
        """Uses `schedule` from the next step on: the same stages and ranks, another number of
        micro-batches."""
        if self.transfers.counter.gloo:
            # gloo matches messages by tag, so receives may start early and alone.
            program = lower(schedule, self._costs)[self.rank]
            self.program = receive_early(program, costs=self._costs)
        else:
            # NCCL needs the same order at both ends of a pair; its host thread runs ahead of the
            # device anyway.
            self.program = lower_to_batches(schedule, self._costs)[self.rank]
        self.schedule = schedule
        self.transfers.schedule = schedule

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        stages: Sequence[nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        mesh: Mesh,
        counter: CommCounter,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        on_grad: OnGrad | None = None,
        timer: PhaseTimer | None = None,
        micro_batches: int | None = None,
        terms: LossTerms | None = None,
    ) -> Pipeline:
        """Makes the pipeline of a plan's schedule and shapes. `stages` are those of
        `stage_indices`, in its order. `micro_batches`: the number per step, if not the plan's.

        Raises ScheduleError for a schedule that the plan's numbers do not fit.
        """
        par = plan.parallel
        rank = mesh.coord.pp
        schedule = schedule_of(par, micro_batches)
        held = dict(zip(stage_indices(plan, rank), stages, strict=True))
        stages = [held[schedule.model_stage(stage)] for stage in schedule.stages_of(rank)]
        sequence = plan.job.train.seq_len // par.cp // (par.tp if par.sp else 1)
        return cls(
            schedule,
            stages,
            loss,
            mesh,
            counter,
            shape=(par.micro_batch_size, sequence, plan.model.hidden),
            dtype=dtype,
            device=device,
            on_grad=on_grad,
            timer=timer,
            compiled=plan.job.train.compile,
            costs=costs_of(plan),
            terms=terms,
        )

    def run(self, micro_batches: Sequence[Batch], loss_scale: float | Tensor = 1.0) -> Tensor:
        """Runs one step, which adds gradients of `loss_scale` times the summed loss to the
        parameters.

        Returns the summed loss, unscaled, of the micro-batches whose last stage is on this rank: a
        scalar on the device, zero on ranks without a last stage, so that its sum over pp is the
        loss. The host does not wait for the device.
        """
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(
                f"{len(micro_batches)} micro-batches, the schedule is for"
                f" {self.schedule.micro_batches}"
            )
        dtype = torch.promote_types(self.transfers.dtype, torch.float32)
        self._micro_batches = micro_batches
        self._total = torch.zeros((), dtype=dtype, device=self.device)
        # The product keeps the dtype, and copies nothing from the host.
        self._scale = torch.ones((), dtype=dtype, device=self.device).mul_(loss_scale)
        self.action_times.restart()
        for batch in self.program:
            match [action.kind for action in batch]:
                case [Kind.F, Kind.B]:
                    self._together(*batch)
                case [Kind.F]:
                    self._forward(batch[0])
                case [Kind.B | Kind.I]:
                    self._backward(batch[0])
                case [Kind.W]:
                    self._weights(batch[0])
                case _:
                    self.transfers.start(batch)
        self._micro_batches = ()
        with self._phase("pipeline_wait"):
            self.transfers.finish()
        return self._total

    def _together(self, forward: Action, backward: Action) -> None:
        """Runs a forward and a backward as one, by turns."""
        if self.one_by_one:
            self._forward(forward)
            self._backward(backward)
            return
        hidden = self._input_of(forward)
        grad = self._grad_of(backward)
        seconds = self.turns.together(
            lambda: self._compute_forward(forward, hidden),
            lambda: self._compute_backward(backward, grad),
        )
        if self._timer is not None:
            for name, spent in zip(("forward", "backward"), seconds, strict=True):
                self._timer.add(name, spent)

    def _forward(self, action: Action) -> None:
        hidden = self._input_of(action)
        with self._phase("forward"):
            self._compute_forward(action, hidden)

    def _input_of(self, action: Action) -> Tensor | None:
        """Waits for the hidden states from which a forward starts; None on the first stage."""
        if self.schedule.is_first(action.stage):
            return None
        return self._wait(action._replace(kind=Kind.RECV_F)).requires_grad_()

    def _compute_forward(self, action: Action, hidden: Tensor | None) -> None:
        _, stage, index = action
        batch = self._micro_batches[index]
        with self.action_times.timed(action):
            with self.terms.forward(index):
                out = self.stages[stage](hidden, batch)
            if self.schedule.is_last(stage):
                out = self.loss(out, batch.targets)
                self._total += out.detach()
            else:
                self.transfers.put(Kind.SEND_F, stage, index, out.detach())
            # The edge keeps the graph alive but not the output, whose memory is free once it is
            # sent.
            self._saved[stage, index] = hidden, get_gradient_edge(out)

    def _backward(self, action: Action) -> None:
        grad = self._grad_of(action)
        with self._phase("backward"):
            self._compute_backward(action, grad)

    def _grad_of(self, action: Action) -> Tensor:
        """Waits for the gradient of a stage's output; that of the loss is its scale."""
        if self.schedule.is_last(action.stage):
            return self._scale
        return self._wait(action._replace(kind=Kind.RECV_B))

    def _compute_backward(self, action: Action, grad: Tensor) -> None:
        kind, stage, index = action
        hidden, edge = self._saved.pop((stage, index))
        with self.action_times.timed(action):
            if kind is Kind.I:
                self.weight_grads.open()
            torch.autograd.backward(edge, grad)
            if kind is Kind.I:
                self._deferred[stage, index] = self.weight_grads.close()
            if hidden is not None:
                assert hidden.grad is not None
                self.transfers.put(Kind.SEND_B, stage, index, hidden.grad)

    def _weights(self, action: Action) -> None:
        _, stage, index = action
        with self._phase("backward"), self.action_times.timed(action):
            self.weight_grads.compute(self._deferred.pop((stage, index)))

    def _wait(self, receive: Action) -> Tensor:
        with self._phase("pipeline_wait"):
            return self.transfers.take(receive)


def stage_indices(plan: Plan, rank: int) -> list[int]:
    """Returns the indices, into the plan's `stage_layers`, of the stages that pipeline rank `rank`
    holds under the plan's schedule, ascending.

    Raises ScheduleError.
    """
    schedule = schedule_of(plan.parallel)
    return sorted({schedule.model_stage(stage) for stage in schedule.stages_of(rank)})


def _numbered_stages(
    schedule: Schedule,
    rank: int,
    stages: Sequence[nn.Module],
) -> dict[int, nn.Module]:
    """Returns the rank's stages by their number in the schedule. Raises ValueError for another
    number of stages than the schedule's."""
    numbers = schedule.stages_of(rank)
    if len(numbers) != len(stages):
        raise ValueError(
            f"pipeline rank {rank} holds stages {list(numbers)} in {schedule.name}, got"
            f" {len(stages)}"
        )
    return dict(zip(numbers, stages, strict=True))


def _no_phase(name: str) -> AbstractContextManager[None]:
    return nullcontext()
