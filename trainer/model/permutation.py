"""Rows copied into another order, and copies summed: each is the backward of the other.

Autograd's own backward of `x[index]` adds row after row to zeros, and sorts on CUDA so as to be
deterministic. Here the places of a row's copies are known, so backward reads each copy once and
writes each sum once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse(order: Tensor) -> Tensor:
    """Of a permutation, int64 [n]: where each number stands in it."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def counted(numbers: Tensor, count: int) -> Tensor:
    """int64 [count]: how often each of 0 to count - 1 is among `numbers`. `bincount` would wait for
    the device."""
    return counted_by_row(numbers.reshape(1, -1), count)[0]


def counted_by_row(numbers: Tensor, count: int) -> Tensor:
    """`numbers` [n, ...] -> int64 [n, count]: how often each of 0 to count - 1 is in each row."""
    numbers = numbers.flatten(1).long()
    return numbers.new_zeros(len(numbers), count).scatter_add_(
        1, numbers, numbers.new_ones(()).expand_as(numbers)
    )


class Places(NamedTuple):
    """Where the copies of each of n rows are."""

    of_copies: Tensor  # int64 [n, k]; or int64 [m], row after row, where rows have unequally many
    starts: Tensor | None = None  # then int64 [n]: where those of each row begin in `of_copies`

    @classmethod
    def unequal(cls, of_copies: Tensor, many: Tensor) -> Places:
        """`many` int64 [n]: how many copies each row has."""
        return cls(of_copies, many.cumsum(0) - many)


def copied(x: Tensor, source: Tensor, places: Places) -> Tensor:
    """[n, h] -> [m, h]: row i is row `source[i]` of `x`, whose copies are at `places`."""
    return _Copied.apply(x, source, *places)


def summed(copies: Tensor, source: Tensor, places: Places) -> Tensor:
    """[m, h] -> [n, h]: the sum of the copies of each row, as `copied` made them; zeros for a row
    without copies."""
    return _Summed.apply(copies, source, *places)


def permuted(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Row i is row `order[i]` of `x` [n, ...]; `places` is the inverse of `order`."""
    return _Copied.apply(x, order, places[:, None], None)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Tensor, places: Tensor, starts: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(places, starts)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(grad, *ctx.saved_tensors), None, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies: Tensor, source: Tensor, places: Tensor, starts: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(source)
        return _sum(copies, places, starts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum(copies: Tensor, places: Tensor, starts: Tensor | None) -> Tensor:
    if starts is None and places.shape[1] == 1:
        return copies.index_select(0, places[:, 0])
    return F.embedding_bag(
        places, copies, starts, mode="sum"
    )  # gathers and adds in one pass, in the same order always
