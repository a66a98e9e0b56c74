"""The interface of an optimizer's rule: how the weights that one rank holds change. `sharded` does
the rest: scaled gradients, master copies, narrow weights, gathering, checkpoints.

Most rules update each element alone, on flat shards that are cut anywhere (`ElementRule`). Rules
that need a whole matrix (its norm, its orthogonal part) are `MatrixRule`s: under ZeRO-1 and -2 the
layout gives each matrix whole to one rank of the shard group, balanced by size. Where tensor
parallelism or ZeRO-3 cut a matrix, the rule uses `owners`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from trainer.comm.collectives import CommCounter
from trainer.errors import LayoutError
from trainer.parallel.params import ParamInfo, StateKind

from .owners import Cut


@dataclass(frozen=True)
class Update:
    """The numbers of one update. The device decides whether it is made, so the host does not
    wait."""

    lr: float
    number: Tensor  # fp32 0-d: updates made, including this one unless it is skipped
    skip: Tensor  # fp32 0-d; 1: nothing may change, since the gradient is not finite

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Sets `tensor` to `value`, unless the update is skipped: for rules whose kernel does not
        take `skip`."""
        tensor.copy_(torch.where(self.skip.bool(), tensor, value))


#: (parameter, start and stop in its flat local elements, position in the shard).
ParamRange = tuple[ParamInfo, int, int, int]


@dataclass
class Shard:
    """Flat elements of one bucket, in the master dtype. A rule changes `master` and `state` in
    place; `grad` is its own to overwrite."""

    master: Tensor
    grad: Tensor
    state: dict[StateKind, Tensor]


@dataclass
class Matrix:
    """This rank's part of one matrix, as views of its shape."""

    info: ParamInfo
    master: Tensor
    grad: Tensor
    state: dict[StateKind, Tensor]
    cuts: tuple[Cut, ...]  # how ranks hold its parts: cuts of tensor parallelism, of ZeRO-3
    #: computes what takes the whole matrix; `master` and `state` may be on the host
    device: torch.device


class ElementRule(Protocol):
    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds of state that the rule keeps: tensors like the weights, initially zero."""

    def step(self, shards: Sequence[Shard], update: Update, decay: bool) -> None:
        """Updates the shards. `decay`: whether weight decay applies to them."""


class MatrixRule(Protocol):
    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds of state that the rule keeps: tensors like the weights, initially zero."""

    def step(
        self,
        matrices: Sequence[Matrix],
        update: Update,
        counter: CommCounter,
    ) -> None:
        """Updates the matrices, in the same order on all ranks that hold parts of them, including
        empty parts."""


@dataclass(frozen=True)
class Rules:
    elements: ElementRule
    matrices: MatrixRule | None = None  # updates the matrices inside blocks
    #: Format of the element rule's state, if it is narrower than the master weights.
    state: Literal["", "bf16", "8bit"] = ""
    seed: int = 0  # of the state's stochastic rounding

    def narrows(self, info: ParamInfo) -> bool:
        """Whether a parameter's state is narrow."""
        return self.state == "bf16" or (self.state == "8bit" and len(info.global_shape) > 1)

    def owns(self, info: ParamInfo) -> bool:
        """Whether the matrix rule updates a parameter: it updates the matrices of layers. Raises
        LayoutError for a matrix that cannot be gathered."""
        inside = info.name.startswith("layers.")
        if self.matrices is None or len(info.global_shape) != 2 or not inside:
            return False
        padded = any(cut.stop - cut.start != cut.padded for cut in info.shards)
        if padded or [cut.axis for cut in info.shards] not in ([], ["tp"]):
            raise LayoutError(f"{info.name}: no whole matrix can be gathered from {info.shards}")
        return True
