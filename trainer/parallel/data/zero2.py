"""ZeRO-2 on flat buckets: gradients too are held as shards (arXiv 1910.02054, section 5.2).

A bucket's whole gradient buffer lives from the first gradient of a micro-batch to the last. Then it is on its way, as a
reduce-scatter that runs beside backward, and what arrives is added to this rank's shard. A step of m micro-batches so
sends m reduce-scatters and one all-gather: 2 Psi (n-1)/n without accumulation, (m + 1) Psi (n-1)/n with it. That is the
price of gradients / n; under pipeline parallelism m is large, and ZeRO-1 sends 2 Psi (the plan warns).

Buckets leave in the order in which backward completes them. All ranks of a group run the same program on the same
layers, so that order is the same on all of them; a schedule for which it is not (DualPipe) is refused in `legal`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.comm.collectives import Handle, start_reduce_scatter

from .buckets import FlatBucket, GradBuckets

#: Reductions under way at most; each holds one bucket's whole gradient.
MOST_UNDER_WAY = 2


class ShardedGradBuckets(GradBuckets):
    """`GradBuckets` whose `grad_shard` is a buffer of its own, and the whole one a visitor."""

    whole_grads = False

    def expect(self, passes: int) -> None:
        """Begin a step of `passes` backward passes. Raises like `GradBuckets.expect`."""
        if passes < 1:
            raise ValueError(f"a step needs at least one backward pass, not {passes}")
        if any(bucket.grads is not None for bucket in self.buckets):
            raise RuntimeError("expect() before finish() of the step before")
        self.passes = passes
        self._under_way: list[tuple[FlatBucket, Handle, Tensor]] = []
        for number, bucket in enumerate(self.buckets):
            bucket.grad_shard.zero_()
            self._received[number] = [0] * len(bucket.infos)

    @torch.no_grad()
    def _take(self, number: int, position: int, param: Tensor) -> None:
        """Clears `param.grad`. A bucket leaves when every parameter has one at least: what comes after (a weight used
        by two stages) leaves with the next micro-batch's, or in `finish`."""
        bucket, received = self.buckets[number], self._received[number]
        if bucket.grads is None:
            bucket.open()
        view = bucket.grad_views[position]
        if received[position]:
            view.add_(param.grad)
        else:
            view.copy_(param.grad)
        param.grad = None
        received[position] += 1
        if all(received):
            self._send(number)

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        self._received[number] = [0] * len(bucket.infos)
        whole = bucket.close()
        self.counter.subject = f"bucket {number}"
        handle = start_reduce_scatter(whole, self.mesh.group("shard"), "dp", self.counter)
        self.counter.subject = ""
        self._under_way.append((bucket, handle, whole))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._arrive()

    def _arrive(self) -> None:
        bucket, handle, _ = self._under_way.pop(0)
        bucket.grad_shard.add_(handle.wait())

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until every `grad_shard` holds the sum over all ranks and passes."""
        for number, bucket in enumerate(self.buckets):
            if bucket.grads is not None:
                self._send(number)
        while self._under_way:
            self._arrive()
        self._sum_parts()

    def grad_of(self, param: Tensor) -> Tensor:
        raise NotImplementedError("ZeRO-2 holds no parameter's whole gradient; see full_grads")

    def grad_tensors(self) -> list[Tensor]:
        """The shards, and whatever whole buffers exist now."""
        whole = [bucket.grads for bucket in self.buckets if bucket.grads is not None]
        return [bucket.grad_shard for bucket in self.buckets] + whole
