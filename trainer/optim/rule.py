"""The interface of an optimizer: how weights change, given what one rank holds of them. `sharded`
does the rest: scaled gradients, master copies, narrow weights, gathering, checkpoints.

Most rules look at each element alone and get flat shards, cut anywhere (`ElementRule`). Rules that
need a whole matrix (its norm, its orthogonal part) are `MatrixRule`s: under ZeRO-1 and -2 the
layout gives each matrix whole to one rank of the shard group, balanced by size. Over what else cuts
it, tensor parallelism and ZeRO-3, the rule asks `owners`.
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
from trainer.parallel.tensor import VOCABULARY

from .owners import Cut


@dataclass(frozen=True)
class Update:
    """One update. The device decides whether it is made, so that the host does not wait."""

    lr: float
    number: Tensor  # fp32 0-d: updates made, this one included unless it is skipped
    skip: Tensor  # fp32 0-d, 1: nothing may change, the gradient is not finite

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor` becomes `value`, unless the update is skipped: for rules without a kernel that
        knows of `skip`."""
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
    cuts: tuple[Cut, ...]  # over which ranks its other parts are: of tensor parallelism, of ZeRO-3


class ElementRule(Protocol):
    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """Names of its state; each is a tensor like the weights, zero at first."""

    def step(self, shards: Sequence[Shard], update: Update, decay: bool) -> None:
        """`decay`: these are parameters that weight decay applies to."""


class MatrixRule(Protocol):
    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """As of `ElementRule`."""

    def step(self, matrices: Sequence[Matrix], update: Update, counter: CommCounter) -> None:
        """In the same order on all ranks that hold parts of them, also where a part is empty."""


@dataclass(frozen=True)
class Rules:
    elements: ElementRule
    matrices: MatrixRule | None = None  # of the matrices inside of blocks
    state: Literal["", "bf16", "8bit"] = (
        ""  # of the rules of elements, if not as wide as master weights
    )
    seed: int = 0  # of its rounding

    def narrows(self, info: ParamInfo) -> bool:
        """Whether a parameter's state is narrow."""
        return self.state == "bf16" or (self.state == "8bit" and len(info.global_shape) > 1)

    def owns(self, info: ParamInfo) -> bool:
        """Whether the matrix rule updates a parameter: matrices but embeddings, positions and the
        head. Raises LayoutError for one that cannot be gathered."""
        outside = info.name.endswith((*VOCABULARY, "embed_positions.weight"))
        if self.matrices is None or len(info.global_shape) != 2 or outside:
            return False
        padded = any(cut.stop - cut.start != cut.padded for cut in info.shards)
        if padded or [cut.axis for cut in info.shards] not in ([], ["tp"]):
            raise LayoutError(f"{info.name}: no whole matrix can be gathered from {info.shards}")
        return True
