"""Copies of rows in another order, and sums of copies: each is the backward of the other.

Autograd's own backward of `x[index]` adds row after row to zeros, and sorts on CUDA in order to be
deterministic. Here the positions of a row's copies are known, so backward reads each copy once and
writes each sum once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation int64 [n]: the position of each number in `order`."""
    return torch.empty_like(order).scatter_(
        0,
        order,
        torch.arange(len(order), device=order.device),
    )


def counted(numbers: Tensor, count: int) -> Tensor:
    """Returns int64 [count]: how often each of 0 to count - 1 is among `numbers`. `bincount` would
    wait for the device."""
    return counted_by_row(numbers.reshape(1, -1), count)[0]


def counted_by_row(numbers: Tensor, count: int) -> Tensor:
    """`numbers` [n, ...] -> int64 [n, count]: how often each of 0 to count - 1 is in each row."""
    numbers = numbers.flatten(1).long()
    return numbers.new_zeros(len(numbers), count).scatter_add_(
        1,
        numbers,
        numbers.new_ones(()).expand_as(numbers),
    )


def read_counts(counts: Tensor) -> list[Any]:
    """Returns integers of the device as nested lists. The host waits for the device: operations
    whose shapes depend on what routers chose need them, and nothing else does."""
    return counts.tolist()


class CopyPositions(NamedTuple):
    """The positions of the copies of each of n rows."""

    of_copies: Tensor  # int64 [n, k]; or int64 [m], row after row, if rows have unequal numbers
    starts: Tensor | None = None  # if unequal: int64 [n], where each row begins in `of_copies`

    @classmethod
    def unequal(cls, of_copies: Tensor, counts: Tensor) -> CopyPositions:
        """`counts` int64 [n]: the number of copies of each row."""
        return cls(of_copies, counts.cumsum(0) - counts)


def copied(x: Tensor, source: Tensor, positions: CopyPositions) -> Tensor:
    """[n, h] -> [m, h]: row i is a copy of row `source[i]` of `x`, whose copies are at
    `positions`."""
    return _Copied.apply(x, source, *positions)


def summed(copies: Tensor, source: Tensor, positions: CopyPositions) -> Tensor:
    """[m, h] -> [n, h]: sums the copies of each row that `copied` made; a row without copies is
    zero."""
    return _Summed.apply(copies, source, *positions)


def permuted(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Permutes rows: row i is row `order[i]` of `x` [n, ...]; `positions` is the inverse of
    `order`."""
    return _Copied.apply(x, order, positions[:, None], None)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        positions: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(positions, starts)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(grad, *ctx.saved_tensors), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        copies: Tensor,
        source: Tensor,
        positions: Tensor,
        starts: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(source)
        return _sum(copies, positions, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum(copies: Tensor, positions: Tensor, starts: Tensor | None) -> Tensor:
    if starts is None and positions.shape[1] == 1:
        return copies.index_select(0, positions[:, 0])
    # This gathers and adds in one pass, always in the same order.
    return F.embedding_bag(positions, copies, starts, mode="sum")
