"""The vocabulary sharded over tensor-parallel ranks: embedding lookup and cross-entropy.

Rank r of n holds rows [r*p, (r+1)*p) with p = ceil(vocab / n); rows past the vocabulary are
padding, which no token looks up and no softmax counts. No rank holds full logits (Shoeybi et al.
2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_gather
from trainer.model.loss import IGNORED

from .tensor import AXIS

#: The log-sum-exp of rows, and the gradient of logits, as one kernel each.
Passes = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]]

#: Logits that are exponentiated at a time, in elements. It bounds the fp32 temporaries of bf16
#: logits.
CHUNK = 1 << 24


class ShardedLookup:
    """An embedding `op` that returns rows of this rank's shard, and zeros for other ranks' tokens.
    The sum over ranks is the lookup."""

    def __init__(self, start: int, stop: int):
        self.start = start
        self.stop = stop

    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        outside = (tokens < self.start) | (tokens >= self.stop)
        rows = F.embedding((tokens - self.start).masked_fill(outside, 0), weight)
        return rows.masked_fill(outside.unsqueeze(-1), 0.0)


class VocabParallelLoss:
    """Computes the sum of -log p(target) over valid tokens from this rank's columns of the logits;
    the result is equal on every tp rank.

    logits [b, s, p], targets int64 [b, s] -> scalar in at least fp32. `valid` is the number of
    columns that are not padding. `compiled`: uses one kernel in each direction, which reads the
    logits once and saves no wide tensors.
    """

    def __init__(
        self,
        start: int,
        valid: int,
        group: dist.ProcessGroup | None,
        counter: CommCounter,
        compiled: bool = False,
    ):
        self.start = start
        self.valid = valid
        self.group = group
        self.counter = counter
        self.passes = (torch.compile(_log_sums), torch.compile(_gradient)) if compiled else None

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.group is None and self.valid == logits.shape[-1] and self.passes is None:
            return _WholeCrossEntropy.apply(logits, targets)
        return _CrossEntropy.apply(logits, targets, self)


def _log_sums(logits: Tensor) -> Tensor:
    """[n, p] -> [n], the log-sum-exp of each row in at least fp32."""
    return torch.logsumexp(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        dim=-1,
    )


def _gradient(
    logits: Tensor,
    total: Tensor,
    target: Tensor,
    scale: Tensor,
    valid: int,
) -> Tensor:
    """Returns scale * (softmax - onehot(target)) of [n, p], zero in padding. `target` -1: the
    target is in another rank's columns."""
    column = torch.arange(logits.shape[1], device=logits.device)
    softmax = torch.exp(logits - total[:, None])
    grad = (softmax - (column == target[:, None]).to(softmax.dtype)) * scale[:, None]
    return torch.where(column < valid, grad, 0.0).to(logits.dtype)


class _WholeCrossEntropy(torch.autograd.Function):
    """The unsharded loss. torch's own saves the log-softmax in fp32 from forward to backward; this
    one saves the logits and recomputes their softmax in backward, in the gradient's memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2)
        target = targets.flatten()
        ctx.save_for_backward(logits, target)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        chunk_sums = [
            F.nll_loss(
                torch.log_softmax(flat[rows], -1, dtype=dtype),
                target[rows],
                ignore_index=IGNORED,
                reduction="sum",
            )
            for rows in _chunks(flat)
        ]
        return chunk_sums[0] if len(chunk_sums) == 1 else torch.stack(chunk_sums).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns d/dlogits = softmax - onehot(target), for valid tokens; zero elsewhere."""
        logits, target = ctx.saved_tensors
        flat = logits.flatten(0, -2)
        scale = ((target != IGNORED) * grad)[:, None]
        column = target.clamp(min=0)[:, None]
        out = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)
        for rows in _chunks(flat):
            out_rows = out[rows]
            same_dtype = out.dtype == grad.dtype
            softmax = out_rows if same_dtype else torch.empty_like(out_rows, dtype=grad.dtype)
            torch.softmax(flat[rows], -1, dtype=grad.dtype, out=softmax)
            softmax.mul_(scale[rows]).scatter_add_(1, column[rows], -scale[rows])
            if softmax is not out_rows:
                out_rows.copy_(softmax)
        return out.view(logits.shape), None


class _CrossEntropy(torch.autograd.Function):
    """The sharded loss. Each rank reduces its columns to two numbers per token, the log-sum-exp and
    the target's logit. One all-gather of these is the only communication; every rank adds them in
    the same order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        shard: VocabParallelLoss,
    ) -> Tensor:
        valid = shard.valid
        flat = logits.flatten(0, -2)
        target = targets.flatten()
        dtype = torch.promote_types(logits.dtype, torch.float32)
        column = target - shard.start
        in_shard = (column >= 0) & (column < valid)  # IGNORED is negative, and in no shard
        column = column.masked_fill(~in_shard, 0)
        statistics = flat.new_zeros(1, 2, target.numel(), dtype=dtype)
        _write_log_sums(statistics[0, 0], flat, valid, shard.passes)
        if valid:
            target_logit = flat.gather(1, column[:, None]).squeeze(1).to(dtype)
            statistics[0, 1] = target_logit.masked_fill(~in_shard, 0.0)
        gathered = all_gather(statistics, shard.group, AXIS, shard.counter)
        log_sums, target_logits = gathered.unbind(1)
        total = torch.logsumexp(log_sums, dim=0)
        counted = target != IGNORED
        ctx.save_for_backward(logits, total, column, in_shard, counted)
        ctx.valid = valid
        ctx.passes = shard.passes
        return (total - target_logits.sum(0)).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns d/dlogits = softmax - onehot(target), for valid tokens and columns; zero
        elsewhere."""
        logits, total, column, in_shard, counted = ctx.saved_tensors
        flat = logits.flatten(0, -2)
        scale = (grad * counted)[:, None]
        if ctx.passes is not None:
            target = column.masked_fill(~in_shard, -1)
            out = ctx.passes[1](flat, total, target, scale[:, 0], ctx.valid)
            return out.view_as(logits), None, None
        out = torch.zeros_like(flat) if ctx.valid < flat.shape[1] else torch.empty_like(flat)
        for rows in _chunks(flat) if ctx.valid else ():
            out_rows = out[rows, : ctx.valid]
            same_dtype = out.dtype == total.dtype
            softmax = out_rows if same_dtype else torch.empty_like(out_rows, dtype=total.dtype)
            torch.sub(flat[rows, : ctx.valid], total[rows, None], out=softmax)
            softmax.exp_().mul_(scale[rows])
            onehot = -in_shard[rows, None].to(softmax.dtype)
            softmax.scatter_add_(1, column[rows, None], scale[rows] * onehot)
            if softmax is not out_rows:
                out_rows.copy_(softmax)
        return out.view_as(logits), None, None


def _write_log_sums(
    out: Tensor,
    logits: Tensor,
    valid: int,
    passes: Passes | None,
) -> None:
    """Writes the log-sum-exp of the first `valid` columns of `logits` [n, p] into `out` [n]."""
    if not valid:
        out.fill_(-torch.inf)
        return
    if passes is not None:
        out.copy_(passes[0](logits[:, :valid]))
        return
    # log_softmax, x - lse, is a fused kernel and logsumexp is not; the largest column gives lse
    # most exactly.
    for rows in _chunks(logits):
        columns = logits[rows, :valid]
        log_softmax = torch.log_softmax(columns, dim=-1, dtype=out.dtype)
        torch.sub(columns.amax(-1), log_softmax.amax(-1), out=out[rows])


def _chunks(flat: Tensor) -> list[slice]:
    """Returns slices of rows that hold at most CHUNK elements each."""
    step = max(1, CHUNK // max(1, flat.shape[1]))
    return [slice(first, first + step) for first in range(0, flat.shape[0], step)]
