"""Rows copied into another order, and copies summed: each is the backward of the other.

Autograd's own backward of `x[index]` adds row after row to zeros, and sorts on CUDA so as to be deterministic. Here the
places of a row's copies are known, so backward reads each copy once and writes each sum once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse(order: Tensor) -> Tensor:
    """Of a permutation, int64 [n]: where each number stands in it."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def counted(numbers: Tensor, count: int) -> Tensor:
    """int64 [count]: how often each of 0 to count - 1 is among `numbers`. `bincount` would wait for the device."""
    zeros = torch.zeros(count, dtype=torch.int64, device=numbers.device)
    return zeros.scatter_add_(0, numbers.flatten().long(), torch.ones_like(numbers, dtype=torch.int64).flatten())


def copied(x: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """[n, ...] -> [n * k, ...]: row i is row `source[i]` of `x`. `places` int64 [n, k]: where a row's copies are."""
    return _Copied.apply(x, source, places)


def summed(copies: Tensor, source: Tensor, places: Tensor) -> Tensor:
    """[n * k, h] -> [n, h]: the sum of the k copies of each row, as `copied` made them."""
    return _Summed.apply(copies, source, places)


def permuted(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Row i is row `order[i]` of `x` [n, ...]; `places` is the inverse of `order`."""
    return _Copied.apply(x, order, places[:, None])


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(source, places)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum(grad, ctx.saved_tensors[1]), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, source: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(source, places)
        return _sum(copies, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _sum(copies: Tensor, places: Tensor) -> Tensor:
    if places.shape[1] == 1:
        return copies.index_select(0, places[:, 0])
    return F.embedding_bag(places, copies, mode="sum")  # gathers and adds in one pass, always in the same order
