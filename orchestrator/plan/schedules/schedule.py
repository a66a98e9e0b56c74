"""A pipeline schedule: the rank of each stage, and the order in which each rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .actions import Action, Kind


@dataclass(frozen=True)
class Schedule:
    """The compute orders of all ranks of one pipeline. `lower` adds the sends and receives.

    Stages count through the model: stage s feeds stage s + 1. A bidirectional schedule (DualPipe)
    holds the model twice: stages [0, S) are the first copy, [S, 2S) the second, and stage S + s has
    the layers of stage s. The first half of the micro-batches runs through the first copy, the
    second half through the second.
    """

    name: str
    pp: int  # ranks
    vpp: int  # stages per rank and model copy
    micro_batches: int
    stage_rank: tuple[int, ...]  # stage -> pipeline rank that holds it
    orders: tuple[tuple[Action, ...], ...]  # rank -> F, B, I, W in order of execution

    @property
    def model_stages(self) -> int:
        """The number of stages of one copy of the model."""
        return self.pp * self.vpp

    @property
    def copies(self) -> int:
        return len(self.stage_rank) // self.model_stages

    @cached_property
    def splits_backward(self) -> bool:
        """Checks whether some backward is split into I and W."""
        return any(action.kind is Kind.W for order in self.orders for action in order)

    def model_stage(self, stage: int) -> int:
        """The index of a stage in the plan's `stage_layers`."""
        return stage % self.model_stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Lists the stages that a rank holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.stage_rank) if owner == rank)

    def route(self, micro_batch: int) -> range:
        """The stages that a micro-batch passes."""
        copy = micro_batch * self.copies // self.micro_batches
        return range(copy * self.model_stages, (copy + 1) * self.model_stages)

    def is_first(self, stage: int) -> bool:
        return self.model_stage(stage) == 0

    def is_last(self, stage: int) -> bool:
        return self.model_stage(stage) == self.model_stages - 1

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Lists the compute actions whose results this one reads. Program order also guarantees the
        ones of its own stage."""
        kind, stage, micro_batch = action
        if kind is Kind.F:
            return () if self.is_first(stage) else (Action(Kind.F, stage - 1, micro_batch),)
        if kind is Kind.W:
            return (Action(Kind.I, stage, micro_batch),)
        forward = Action(Kind.F, stage, micro_batch)
        if self.is_last(stage):
            return (forward,)
        return forward, Action(
            self._backward_of(stage + 1, micro_batch),
            stage + 1,
            micro_batch,
        )

    def _backward_of(self, stage: int, micro_batch: int) -> Kind:
        return Kind.I if (stage, micro_batch) in self._split else Kind.B

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset(
            (a.stage, a.micro_batch) for order in self.orders for a in order if a.kind is Kind.I
        )


def loop_placement(pp: int, vpp: int) -> tuple[int, ...]:
    """Places stage s on rank s % pp: each rank holds every pp-th stage (Narayanan et al. 2021,
    section 2.2)."""
    return tuple(range(pp)) * vpp


def v_placement(pp: int) -> tuple[int, ...]:
    """Places two stages per rank, down and back up: rank 0 holds the first and the last stage."""
    return (*range(pp), *reversed(range(pp)))


def mirror_placement(pp: int) -> tuple[int, ...]:
    """Places two model copies in opposite directions: rank r holds stage r of the first copy and
    stage pp - 1 - r of the second."""
    return (*range(pp), *reversed(range(pp)))
