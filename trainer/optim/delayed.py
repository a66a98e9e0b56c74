"""Updates on the host that overlap with the next step's computation: ZeRO-Offload's delayed
parameter update (arXiv 2101.06840, section 5.2). It changes the training: each step computes with
weights that lack the latest update.

    step t:  gradient g(t) of the weights w(t-2)
             while step t+1 computes with w(t-1):  w(t) = update(w(t-1), g(t))

The first two steps both compute with the initial weights. The update in progress reads one gradient
buffer while backward fills a second one. A checkpoint needs, in addition to the optimizer's state,
the weights that the next step computes with: they are saved as state of the kind `STALE`, so that a
resumed run continues on any layout as this one would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from trainer.host.memory import HostMemory
from trainer.parallel.params import STALE

from .sharded import (
    ShardedOptimizer,
    StateSlice,
    copy_weights_to_device,
    is_first_replica,
    param_ranges,
)


class DelayedOptimizer:
    """A `ShardedOptimizer` on the host whose updates end during the next step."""

    def __init__(self, inner: ShardedOptimizer, host: HostMemory):
        self.inner = inner
        self.host = host
        self.buckets = inner.buckets
        self._grads: list[Tensor] = []  # by bucket: the gradient of the update in progress
        for bucket in self.buckets.buckets:
            assert bucket.host_grad is not None
            self._grads.append(host.zeros(bucket.host_grad.numel(), bucket.host_grad.dtype))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-update")
        self._update: Future[None] | None = None

    @property
    def step_count(self) -> int:
        """Updates made so far, including the one in progress."""
        return self.inner.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self.inner.step_count = count

    @property
    def copied(self) -> torch.cuda.Event | None:
        return self.inner.copied

    @copied.setter
    def copied(self, event: torch.cuda.Event | None) -> None:
        self.inner.copied = event

    def wait(self) -> None:
        """Waits for the update in progress, if any."""
        if self._update is not None:
            self._update.result()
            self._update = None

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """Copies the weights of the previous update to the device, and starts this one. The
        arguments are those of `ShardedOptimizer.step`."""
        self.wait()
        factor, update = self.inner.decide(lr, grad_scale, finite)
        for at, bucket in enumerate(self.buckets.buckets):
            assert bucket.host_grad is not None
            spare = self._grads[at]
            self._grads[at] = bucket.host_grad
            if bucket.grad_shard is bucket.host_grad:
                bucket.grad_shard = spare
            bucket.host_grad = spare
        states = zip(self.buckets.buckets, self.inner.states, strict=True)
        for bucket, state in reversed(list(states)):
            # The copy goes through the memory of a gradient that is no longer read.
            copy_weights_to_device(bucket, state.master)
            self.buckets.gather(bucket)
        self.host.settle()  # the update is about to change what is being copied

        def run() -> None:
            with torch.no_grad():  # each thread has its own grad mode
                for group in self.inner.groups:
                    grads = [self._grads[at] for at in group]
                    self.inner.compute(group, grads, factor, update)

        self._update = self._thread.submit(run)

    # -------------------------------------------------------------------------------------------
    #     checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """Yields the state like `ShardedOptimizer.slices`, and the weights that the next step
        computes with."""
        self.wait()
        self.buckets.wait_params()
        yield from self.inner.slices()
        for bucket in self.buckets.buckets:
            first = is_first_replica(self.buckets, bucket)
            for info, start, stop, at in param_ranges(bucket):
                weights = bucket.param_shard[at : at + stop - start]
                writes = first and info.owner
                yield StateSlice(info, STALE, start, stop, weights, writes=writes)

    @torch.no_grad()
    def copy_masters_to_params(self, stale: bool = False) -> None:
        """Gathers whole weights on every rank, after a load into `slices`. With `stale` they are
        the loaded stale weights, which only a checkpoint of a delayed run contains, else the
        masters."""
        if not stale:
            self.inner.copy_masters_to_params()
            return
        for bucket in self.buckets.buckets:
            self.buckets.gather(bucket)
        self.buckets.wait_params()

    def tensors(self) -> list[Tensor]:
        """Returns the state on the device in addition to the parameters: none."""
        return []
