"""The loss of one micro-batch as a sum; the engine divides once, by the global number of valid
tokens. And terms that modules of any stage add to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target of a token that does not count


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) over the valid tokens; logits [b, s, vocab], targets int64 [b, s] ->
    scalar, >= fp32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


class _Running(threading.local):
    """The micro-batch whose forward runs in this thread now; None in recomputation, which may be
    another thread's."""

    forward_of: int | None = None


class LossTerms:
    """Terms that modules add to the loss, by name: a router's balance, a z-loss, the loss of
    another head.

    A term hangs on a hidden state that the module passes on: `add` returns the state unchanged, and
    when its gradient comes, the term gets its own. So terms follow every schedule, split backward
    and recomputation, and stages have no further outputs. Gradients and metrics of a step are sums
    over micro-batches and ranks, each divided explicitly.
    """

    def __init__(self) -> None:
        self.sums: dict[
            str, Tensor | None
        ] = {}  # this rank's share of each term in this step, divided; None: nothing
        self.samples = self.tokens = (
            1  # of the step on all ranks, masked ones too: what else a term may divide by
        )
        self._loss_scale = torch.ones((), dtype=torch.float64)
        self._valid_tokens = 1
        self._taken = 0
        self._running = _Running()
        self._copies: dict[str, int] = {}

    def declare(self, *names: str, copies: int = 1) -> None:
        """Every rank declares all terms of the model in the same order, those of other stages too.
        `copies`: ranks with states of their own that add the same value, where its gradient is all
        of theirs together."""
        self.sums |= dict.fromkeys(names)
        self._copies |= dict.fromkeys(names, copies)

    def start(
        self, loss_scale: Tensor, valid_tokens: int, micro_batches: int, samples: int, tokens: int
    ) -> None:
        """Begin a step. `loss_scale` is 0-d on the device; `valid_tokens`, `samples` and `tokens`
        are global counts; micro-batches from number `taken` on are padding, whose terms are
        zero."""
        self.samples = samples
        self.tokens = tokens
        self._loss_scale = loss_scale
        self._valid_tokens = valid_tokens
        self._taken = micro_batches
        self.sums = dict.fromkeys(self.sums)

    @contextlib.contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Around the forward of a stage. What recomputation adds again, outside of this, does not
        count twice."""
        self._running.forward_of = micro_batch
        try:
            yield
        finally:
            self._running.forward_of = None

    @property
    def counts(self) -> bool:
        """Whether the forward of a micro-batch that is no padding runs now, and not its
        recomputation."""
        micro_batch = self._running.forward_of
        return micro_batch is not None and micro_batch < self._taken

    def add(self, name: str, x: Tensor, value: Tensor, divisor: float | None = None) -> Tensor:
        """`x`, on whose way the loss grows by `value` (0-d) / `divisor`, by default over the step's
        global number of valid tokens.

        `value` belongs to the tokens of `x`: ranks with other tokens add their own share, and tp
        ranks that hold the same `x` all add the same. Where tp ranks hold the same `x` but sum its
        gradient (inside a region of sequence parallelism), `value` is that over tp. Raises
        ValueError for a name that was not declared.
        """
        if name not in self.sums:
            raise ValueError(
                f"loss term {name!r} is not declared; declared: {', '.join(self.sums) or 'none'}"
            )
        if not self.counts:  # padding is a collective, as all others are
            return _Attached.apply(x, value, self._loss_scale, 0.0)
        share = 1.0 / (self._valid_tokens if divisor is None else divisor)
        term = value.detach().double() * (share / self._copies[name])
        total = self.sums[name]
        self.sums[name] = term if total is None else total + term
        return _Attached.apply(x, value, self._loss_scale, share)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, loss_scale: Tensor, share: float) -> Tensor:
        ctx.loss_scale = loss_scale
        ctx.share = share
        ctx.dtype = value.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, (ctx.loss_scale * ctx.share).to(ctx.dtype), None, None
