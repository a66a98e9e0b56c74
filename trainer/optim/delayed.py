"""Updates on the host beside the next step's computation: ZeRO-Offload's delayed parameter update
(arXiv 2101.06840, section 5.2). It is another training than without: each step computes with
weights that lack the update before it.

    step t:  gradient g(t) of the weights w(t-2);  while step t+1 computes with w(t-1):  w(t) =
    update(w(t-1), g(t))

The first two steps both compute with the initial weights. The gradient of the update under way is
kept while backward fills a second buffer. What a checkpoint needs beside the states are the weights
that the next step computes with: they are saved as state of the kind `STALE`, so that a resumed
run, on any layout, goes on as this one would have.
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
    """A `ShardedOptimizer` on the host whose updates end in the next step."""

    def __init__(self, inner: ShardedOptimizer, host: HostMemory):
        self.inner = inner
        self.host = host
        self.buckets = inner.buckets
        self._kept: list[Tensor] = []  # by bucket: the gradient of the update under way
        for bucket in self.buckets.buckets:
            assert bucket.host_grad is not None
            self._kept.append(host.zeros(bucket.host_grad.numel(), bucket.host_grad.dtype))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-update")
        self._update: Future[None] | None = None

    @property
    def step_count(self) -> int:
        """Updates made so far, the one under way among them."""
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
        """Wait for the update under way, if there is one."""
        if self._update is not None:
            self._update.result()
            self._update = None

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """Give the device the weights of the update before, and start this one. As
        `ShardedOptimizer.step`."""
        self.wait()
        factor, update = self.inner.decide(lr, grad_scale, finite)
        for at, bucket in enumerate(self.buckets.buckets):
            assert bucket.host_grad is not None
            spare, self._kept[at] = self._kept[at], bucket.host_grad
            if bucket.grad_shard is bucket.host_grad:
                bucket.grad_shard = spare
            bucket.host_grad = spare
        for bucket, state in reversed(
            list(zip(self.buckets.buckets, self.inner.states, strict=True))
        ):
            copy_weights_to_device(
                bucket, state.master
            )  # through the memory of a gradient that nobody reads any more
            self.buckets.gather(bucket)
        self.host.settle()  # what it copies is about to be changed

        def run() -> None:
            with torch.no_grad():  # known to each thread by itself
                for group in self.inner.groups:
                    self.inner.compute(group, [self._kept[at] for at in group], factor, update)

        self._update = self._thread.submit(run)

    # -------------------------------------------------------------------------------------------
    #     checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """As `ShardedOptimizer.slices`, and the weights that the next step computes with."""
        self.wait()
        self.buckets.wait_params()
        yield from self.inner.slices()
        for bucket in self.buckets.buckets:
            first = is_first_replica(self.buckets, bucket)
            for info, start, stop, at in param_ranges(bucket):
                weights = bucket.param_shard[at : at + stop - start]
                yield StateSlice(info, STALE, start, stop, weights, first and info.owner)

    @torch.no_grad()
    def copy_masters_to_params(self, stale: bool = False) -> None:
        """After a load into `slices`: on every rank, whole weights; `stale`: those that were loaded
        as such, which a checkpoint of a run without delay does not have."""
        if not stale:
            self.inner.copy_masters_to_params()
            return
        for bucket in self.buckets.buckets:
            self.buckets.gather(bucket)
        self.buckets.wait_params()

    def tensors(self) -> list[Tensor]:
        """State on the device in addition to the parameters: none."""
        return []
