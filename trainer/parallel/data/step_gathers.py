"""ZeRO-3 for schedules that split backward: weights are sharded too (arXiv 1910.02054, section
5.3), and are whole within a step only.

torch's `fully_shard` takes gradients from autograd alone, so it does not know a backward in two
parts. Here ZeRO-2's flat buckets take and reduce the gradients. All weights are gathered at the
start of a step, in the order in which a forward first uses them, while earlier parts compute. They
are freed at its end, so between steps a rank holds its shard of weights, gradients and optimizer
state. Under pipeline parallelism `fully_shard` gathers once a step and frees at its end, too
(`fsdp.py`): (m + 1) Psi (n-1)/n for m micro-batches either way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.parallel.params import ParamInfo

from .flat_bucket import CutParameter, FlatBucket
from .layout import Bucket
from .zero2 import ShardedGradBuckets


class StepGatheredBuckets(ShardedGradBuckets):
    """`ShardedGradBuckets` with a separate buffer for `param_shard`; the whole parameters are
    temporary."""

    zero_stages = (3,)

    def _add_bucket(
        self,
        layout: Bucket,
        members: list[tuple[str, Parameter, ParamInfo]],
        reduce_dtype: torch.dtype,
        cut: CutParameter | None,
    ) -> None:
        super()._add_bucket(layout, members, reduce_dtype, cut)
        bucket = self.buckets[-1]
        if self._shard_group(bucket) is not None:
            bucket.param_shard = bucket.param_shard.clone()
            self._free(bucket)

    # -------------------------------------------------------------------------------------------
    #     a step

    def start_forward(self) -> None:
        """Starts to gather all parameters, and waits for those that no part of a forward waits
        for."""
        self._gather_all()
        super().start_forward()

    def finish(self) -> None:
        """Waits until every `grad_shard` holds the sum over all ranks and passes, and frees the
        whole parameters."""
        super().finish()
        self._free_all()

    @property
    def gathers(self) -> bool:
        """Whether `gather` sends messages: never, since a step gathers when it starts."""
        return False

    def gather(self, bucket: FlatBucket) -> None:
        """Does nothing: the next step gathers when it starts."""

    def _gather_all(self) -> None:
        for bucket in reversed(self.buckets):  # in forward order
            size = bucket.params.numel() * bucket.params.itemsize
            bucket.params.untyped_storage().resize_(size)
            super().gather(bucket)

    def _free_all(self) -> None:
        for bucket in self.buckets:
            bucket.wait_gather()
            self._free(bucket)

    def _free(self, bucket: FlatBucket) -> None:
        """Frees the whole parameters, unless this rank's shard is all of them."""
        if self._shard_group(bucket) is not None:
            bucket.params.untyped_storage().resize_(0)

    # -------------------------------------------------------------------------------------------
    #     views

    def full_params(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Yields every parameter whole, gathered: for verification only."""
        self._gather_all()
        self.wait_params()
        yield from super().full_params()
        self._free_all()

    def param_tensors(self) -> list[Tensor]:
        """The storage of the shards, for memory metrics."""
        return [bucket.param_shard for bucket in self.buckets]
