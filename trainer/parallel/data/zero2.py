"""ZeRO-2 on flat buckets: gradients are sharded too (arXiv 1910.02054, section 5.2).

A bucket's whole gradient buffer exists from the first to the last gradient of a micro-batch. Then a
reduce-scatter sends it, concurrently with backward, and the result is added to this rank's shard. A
step of m micro-batches sends m reduce-scatters and one all-gather: 2 Psi (n-1)/n without
accumulation, (m + 1) Psi (n-1)/n with it, in exchange for 1/n of the gradient memory. Under
pipeline parallelism m is large and ZeRO-1, which sends 2 Psi, is cheaper (the plan warns).

Hybrid sharding: a shard is summed over the replicas once a step, when the last micro-batch has been
added to it, concurrently with the rest of backward.

Buckets are sent in the order in which backward completes them. All ranks of a group run the same
program on the same layers, so they agree on that order; a schedule for which they do not (DualPipe)
is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.comm.collectives import Handle, all_reduce
from trainer.comm.narrow_wire import start_shard_sum

from .buckets import GradBuckets, axis_of_sum

#: Maximum number of reductions in progress; each holds one bucket's whole gradient.
MOST_IN_FLIGHT = 2


class ShardedGradBuckets(GradBuckets):
    """`GradBuckets` with a separate buffer for `grad_shard`; the whole gradient buffer is
    temporary."""

    zero_stages = (2,)
    keeps_whole_grads = False
    #: The buckets of which the previous step, with as many passes, has shown that each pass sends
    #: them once; a weight that two stages use may be sent twice.
    _sent_once_a_pass = frozenset[int]()

    def expect(self, passes: int) -> None:
        """Begins a step of `passes` backward passes. Raises like `GradBuckets.expect`."""
        if passes < 1:
            raise ValueError(f"a step needs at least one backward pass, not {passes}")
        if any(bucket.grads is not None for bucket in self.buckets):
            raise RuntimeError("expect() before finish() of the previous step")
        if self.host is not None:
            self.host.settle()
        if passes != self.passes:  # what steps of other lengths have shown may not hold
            self._sent_once_a_pass = frozenset()
        self.passes = passes
        self._in_flight: list[tuple[int, Handle, Tensor]] = []
        self._arrivals = [0] * len(self.buckets)
        for number, bucket in enumerate(self.buckets):
            bucket.grad_shard.zero_()
            bucket.summed = False
            self._received[number] = [0] * len(bucket.infos)

    @torch.no_grad()
    def _accumulate(self, number: int, position: int, param: Tensor) -> None:
        """Adds a gradient to its bucket, and clears `param.grad`. A bucket is sent when every
        parameter has a gradient. A second gradient, of a weight that two stages use, is sent with
        those of the next micro-batch, or in `finish`."""
        bucket = self.buckets[number]
        if bucket.cut is not None:
            self._send_runs(number, param)
            return
        received = self._received[number]
        if bucket.grads is None:
            bucket.open()
        view = bucket.grad_views[position]
        grad = param.grad
        assert grad is not None
        if received[position]:
            view.add_(grad)
        else:
            view.copy_(grad)
        param.grad = None
        received[position] += 1
        if all(received):
            self._send(number)

    def _send_runs(self, number: int, param: Tensor) -> None:
        """Sends the gradient of a parameter that is cut, bucket by bucket, and clears
        `param.grad`."""
        assert param.grad is not None
        grad = param.grad.flatten()
        param.grad = None
        for run in range(number, number + self.buckets[number].buckets):
            bucket = self.buckets[run]
            start = -bucket.layout.slots[0].start
            elements = grad[start : start + bucket.layout.numel]
            bucket.open()
            bucket.whole_grads[: elements.numel()].copy_(elements)
            self._send(run)

    def _send(self, number: int) -> None:
        """Starts to reduce the gradients in a bucket."""
        bucket = self.buckets[number]
        self._received[number] = [0] * len(bucket.infos)
        full_grads = bucket.close()
        self.counter.subject = f"bucket {number}"
        group = self._shard_group(bucket)
        handle = start_shard_sum(full_grads, group, self.counter, self.wire)
        self.counter.subject = ""
        self._in_flight.append((number, handle, full_grads))
        while len(self._in_flight) > MOST_IN_FLIGHT:
            self._arrive()

    def _arrive(self) -> None:
        """Adds the oldest reduction in progress to its shard. The shard's last one of the step is
        followed by the sum over the replicas. Raises RuntimeError for one that comes later."""
        number, handle, full_grads = self._in_flight.pop(0)
        bucket = self.buckets[number]
        if bucket.summed:
            raise RuntimeError(f"bucket {number} got gradients after its last pass of this step")
        bucket.grad_shard.add_(handle.wait().to(bucket.grad_shard.device))
        if self.rooms is not None:
            self.rooms.give_back(full_grads)
        self._arrivals[number] += 1
        last = self._arrivals[number] == self.passes
        if last and number in self._sent_once_a_pass and not self._on_host:
            self._sum_replicas(bucket)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits until every `grad_shard` holds the sum over all ranks and passes."""
        for number, bucket in enumerate(self.buckets):
            if bucket.grads is not None:
                self._send(number)
        while self._in_flight:
            self._arrive()
        self._sum_parts()
        self._sent_once_a_pass = frozenset(
            number for number, count in enumerate(self._arrivals) if count == self.passes
        )

    @property
    def _on_host(self) -> bool:
        """Whether the host holds the gradient shards."""
        return self.host is not None and self.host.takes_gradients

    def _sum_parts(self) -> None:
        if not self._on_host:
            super()._sum_parts()
            return
        # One shard at a time is back on the device for these sums.
        for bucket in self.buckets:
            names = [bucket.kind.groups.replica, *bucket.kind.sums]
            groups = [(name, self.mesh.group(name)) for name in names]
            if all(group is None for _, group in groups):
                continue
            shard = bucket.grad_shard.to(bucket.params.device)
            for name, group in groups:
                axis = axis_of_sum(name, bucket.kind.groups)
                all_reduce(shard, group, axis, self.counter)
            bucket.grad_shard.copy_(shard)

    def grad_tensors(self) -> list[Tensor]:
        """The storage of the shards and of the current whole buffers, for memory metrics."""
        full_grads = list[Tensor]()
        if self.rooms is None:
            for bucket in self.buckets:
                if bucket.grads is not None:
                    full_grads.append(bucket.grads)
        return (
            full_grads
            if self._on_host
            else [bucket.grad_shard for bucket in self.buckets] + full_grads
        )
