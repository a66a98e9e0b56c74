"""The vocabulary sharded over tensor-parallel ranks: embedding lookup and cross-entropy.

Rank r of n holds rows [r*p, (r+1)*p) with p = ceil(vocab / n); rows past the vocabulary are
padding, which no token looks up and no softmax counts. No rank holds full logits (Shoeybi et al.
2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_gather
from trainer.model.loss import IGNORED

from .tensor import AXIS

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

    logits [b, s, p], targets int64 [b, s] -> scalar in at least fp32. `start` is the number of the
    first column, `valid` the number of columns that are not padding. `compiled`: reads all logits
    once in each direction, and makes no tensors as wide as they are but their gradient.
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
        self.passes = IN_CHUNKS
        if compiled and valid:
            self.passes = IN_ONE_PASS.compiled()

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        is_whole = self.group is None and self.valid == logits.shape[-1]
        if is_whole and self.passes is IN_CHUNKS:
            return _WholeCrossEntropy.apply(logits, targets)
        return _CrossEntropy.apply(logits, targets, self)


def _columns(target: Tensor, start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Returns (each target's column in this shard, 0 if it is in none; whether it is in it)."""
    column = target - start
    in_shard = (column >= 0) & (column < valid)  # IGNORED is negative, and in no shard
    return column.masked_fill(~in_shard, 0), in_shard


def _statistics(logits: Tensor, target: Tensor, start: int, valid: int) -> Tensor:
    """logits [n, p], target int64 [n] -> [1, 2, n] in at least fp32: the log-sum-exp of each row's
    valid columns, and the target's logit, 0 if another rank has it."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_sums = torch.logsumexp(logits[:, :valid].to(wide), dim=-1)
    return torch.stack([log_sums, _target_logits(logits, target, start, valid)])[None]


def _target_logits(logits: Tensor, target: Tensor, start: int, valid: int) -> Tensor:
    column, in_shard = _columns(target, start, valid)
    wide = torch.promote_types(logits.dtype, torch.float32)
    target_logits = logits.gather(1, column[:, None]).squeeze(1).to(wide)
    return target_logits.masked_fill(~in_shard, 0.0)


def _statistics_in_chunks(logits: Tensor, target: Tensor, start: int, valid: int) -> Tensor:
    """`_statistics`, with fp32 temporaries of a bounded size."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    statistics = logits.new_zeros(1, 2, target.numel(), dtype=wide)
    if not valid:
        statistics[0, 0] = -torch.inf
        return statistics
    # log_softmax, x - lse, is a fused kernel and logsumexp is not; the largest column gives lse
    # most exactly.
    for rows in _chunks(logits):
        columns = logits[rows, :valid]
        log_softmax = torch.log_softmax(columns, dim=-1, dtype=wide)
        torch.sub(columns.amax(-1), log_softmax.amax(-1), out=statistics[0, 0, rows])
    statistics[0, 1] = _target_logits(logits, target, start, valid)
    return statistics


def _summed(statistics: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics of all ranks [ranks, 2, n] -> (the loss, the log-sum-exp of whole rows [n])."""
    log_sums, target_logits = statistics.unbind(1)
    total = log_sums[0] if len(log_sums) == 1 else torch.logsumexp(log_sums, dim=0)
    losses = (total - target_logits.sum(0)).masked_fill(target == IGNORED, 0.0)
    return losses.sum(), total


def _gradient(
    logits: Tensor,
    total: Tensor,
    target: Tensor,
    grad: Tensor,
    start: int,
    valid: int,
) -> Tensor:
    """Returns grad * (softmax - onehot(target)) of [n, p] for valid tokens and columns; zero
    elsewhere. `total`: the log-sum-exp of whole rows [n]."""
    column = torch.arange(logits.shape[1], device=logits.device)
    softmax = torch.exp(logits - total[:, None])
    # No column is that of a target in another shard; a column of padding becomes zero below.
    out = softmax - (column == (target - start)[:, None]).to(softmax.dtype)
    out = out * (grad * (target != IGNORED))[:, None]
    return torch.where(column < valid, out, 0.0).to(logits.dtype)


def _gradient_in_chunks(
    logits: Tensor,
    total: Tensor,
    target: Tensor,
    grad: Tensor,
    start: int,
    valid: int,
) -> Tensor:
    """`_gradient`, with fp32 temporaries of a bounded size."""
    column, in_shard = _columns(target, start, valid)
    scale = (grad * (target != IGNORED))[:, None]
    out = torch.zeros_like(logits) if valid < logits.shape[1] else torch.empty_like(logits)
    for rows in _chunks(logits) if valid else ():
        out_rows = out[rows, :valid]
        same_dtype = out.dtype == total.dtype
        softmax = out_rows if same_dtype else torch.empty_like(out_rows, dtype=total.dtype)
        torch.sub(logits[rows, :valid], total[rows, None], out=softmax)
        softmax.exp_().mul_(scale[rows])
        onehot = -in_shard[rows, None].to(softmax.dtype)
        softmax.scatter_add_(1, column[rows, None], scale[rows] * onehot)
        if softmax is not out_rows:
            out_rows.copy_(softmax)
    return out


class Passes(NamedTuple):
    """The computations of the sharded loss, as `_statistics`, `_summed` and `_gradient` do them."""

    statistics: Callable[..., Tensor]
    summed: Callable[..., tuple[Tensor, Tensor]]
    gradient: Callable[..., Tensor]

    def compiled(self) -> Passes:
        return Passes(
            statistics=torch.compile(self.statistics),
            summed=torch.compile(self.summed),
            gradient=torch.compile(self.gradient),
        )


IN_CHUNKS = Passes(_statistics_in_chunks, _summed, _gradient_in_chunks)
#: Each compiled to a kernel or two; uncompiled they would make wide temporaries.
IN_ONE_PASS = Passes(_statistics, _summed, _gradient)


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
        target = targets.flatten()
        statistics = shard.passes.statistics(
            logits.flatten(0, -2),
            target,
            start=shard.start,
            valid=shard.valid,
        )
        statistics = all_gather(statistics, shard.group, AXIS, shard.counter)
        loss, total = shard.passes.summed(statistics, target)
        ctx.save_for_backward(logits, total, target)
        ctx.shard = shard
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, target = ctx.saved_tensors
        shard = ctx.shard
        flat = logits.flatten(0, -2)
        out = shard.passes.gradient(
            flat,
            total,
            target,
            grad,
            start=shard.start,
            valid=shard.valid,
        )
        return out.view_as(logits), None, None


def _chunks(flat: Tensor) -> list[slice]:
    """Returns slices of rows that hold at most CHUNK elements each."""
    step = max(1, CHUNK // max(1, flat.shape[1]))
    return [slice(first, first + step) for first in range(0, flat.shape[0], step)]
