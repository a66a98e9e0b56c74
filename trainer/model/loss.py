"""The loss of one micro-batch as a sum, and the terms that modules of any stage add to it. The
engine divides the sum once, by the global number of valid tokens.
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
    """Returns the sum of -log p(target) over the valid tokens: logits [b, s, vocab], targets int64
    [b, s] -> scalar in at least fp32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


class _Running(threading.local):
    """The micro-batch whose forward runs in this thread; None during recomputation, which may run
    in another thread."""

    forward_of: int | None = None


class LossTerms:
    """The terms that modules add to the loss, by name: a router's balance, a z-loss, the loss of
    another head.

    A term is attached to a hidden state that the module passes on: `add` returns the state
    unchanged, and when the state's gradient arrives, the term gets its own. So terms work with
    every schedule, split backward and recomputation, and stages need no additional outputs.
    Gradients and metrics of a step are sums over micro-batches and ranks, each divided explicitly.
    """

    def __init__(self) -> None:
        #: This rank's share of each term in this step, divided; None: not added yet.
        self.sums: dict[str, Tensor | None] = {}
        #: Samples and tokens of the step on all ranks, including masked ones, as divisors of terms.
        self.samples = 1
        self.tokens = 1
        self._loss_scale = torch.ones((), dtype=torch.float64)
        self._valid_tokens = 1
        self._micro_batches = 0
        self._running = _Running()
        self._copies: dict[str, int] = {}

    def declare(self, *names: str, copies: int = 1) -> None:
        """Declares terms. Every rank declares all terms of the model in the same order, including
        those of other stages. `copies`: the number of ranks with different states that add the same
        value, and whose gradients add up to that of the value."""
        self.sums |= dict.fromkeys(names)
        self._copies |= dict.fromkeys(names, copies)

    def start(
        self,
        loss_scale: Tensor,
        valid_tokens: int,
        micro_batches: int,
        samples: int,
        tokens: int,
    ) -> None:
        """Begins a step. `loss_scale` is 0-d on the device; `valid_tokens`, `samples` and `tokens`
        are global counts. Micro-batches from number `micro_batches` on are padding, whose terms are
        zero."""
        self.samples = samples
        self.tokens = tokens
        self._loss_scale = loss_scale
        self._valid_tokens = valid_tokens
        self._micro_batches = micro_batches
        self.sums = dict.fromkeys(self.sums)

    @contextlib.contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """Context manager around the forward of a stage. Recomputation runs outside of it, so that
        its terms do not count twice."""
        self._running.forward_of = micro_batch
        try:
            yield
        finally:
            self._running.forward_of = None

    @property
    def counts(self) -> bool:
        """Whether the running code is the forward, and not the recomputation, of a micro-batch that
        is not padding."""
        micro_batch = self._running.forward_of
        return micro_batch is not None and micro_batch < self._micro_batches

    def add(
        self,
        name: str,
        x: Tensor,
        value: Tensor,
        divisor: float | None = None,
    ) -> Tensor:
        """Adds `value` (0-d) / `divisor` to the loss; the default divisor is the step's global
        number of valid tokens. Returns `x`, through which the term gets its gradient.

        `value` belongs to the tokens of `x`: ranks with other tokens add their own share, and tp
        ranks that hold the same `x` all add the same value. Where tp ranks hold the same `x` but
        sum its gradient (inside a region of sequence parallelism), they add the value divided by
        tp. Raises ValueError for a name that was not declared.
        """
        if name not in self.sums:
            raise ValueError(
                f"loss term {name!r} is not declared; declared: {', '.join(self.sums) or 'none'}"
            )
        if not self.counts:  # padding takes part in collectives, with a gradient of zero
            return _Attached.apply(x, value, self._loss_scale, 0.0)
        share = 1.0 / (self._valid_tokens if divisor is None else divisor)
        term = value.detach().double() * (share / self._copies[name])
        total = self.sums[name]
        self.sums[name] = term if total is None else total + term
        return _Attached.apply(x, value, self._loss_scale, share)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        loss_scale: Tensor,
        share: float,
    ) -> Tensor:
        ctx.loss_scale = loss_scale
        ctx.share = share
        ctx.dtype = value.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return grad, (ctx.loss_scale * ctx.share).to(ctx.dtype), None, None
