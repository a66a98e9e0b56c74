"""Hybrid sharding with ZeRO-3: sums of gradient shards over the replicas, beside backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.parallel.params import GradGroups

from .sharded_parameter import ShardedParameter, local_rows


class ReplicaSums:
    """Sums of gradient shards over the replicas of hybrid sharding, one message per unit.

    FSDP2 calls a unit's hook (`set_all_reduce_hook`) before it adds the shard to the sum of earlier
    passes. So each unit's sum over replicas starts when the next unit's hook is called, or in
    `end`. Hooks are called in the same order on all ranks.
    """

    def __init__(self, mesh: Mesh, counter: CommCounter):
        self.mesh = mesh
        self.counter = counter
        self.passes = 0
        self._waiting = list[int]()
        self._units = list[list[ShardedParameter]]()
        self._passes_of_unit = list[int]()

    def any(self, classes: Sequence[GradGroups]) -> bool:
        return any(self.mesh.group(groups.replica) is not None for groups in classes)

    def start(self, passes: int) -> None:
        self.passes = passes
        self._passes_of_unit = [0] * len(self._units)

    def unit(self, buckets: list[ShardedParameter]) -> Callable[[Tensor], None]:
        """Returns the hook that FSDP2 calls after each pass of a unit with these parameters, on the
        stream where it adds the shard."""
        number = len(self._units)
        self._units.append(buckets)

        def count_pass(shard: Tensor) -> None:
            self._passes_of_unit[number] += 1
            if self._passes_of_unit[number] == self.passes:
                self._sum()
                self._waiting.append(number)

        return count_pass

    def end(self) -> None:
        """Sums the remaining units: the last one, and those without gradients in some pass."""
        self._waiting += [
            number for number, passes in enumerate(self._passes_of_unit) if passes < self.passes
        ]
        self._sum()

    @torch.no_grad()
    def _sum(self) -> None:
        while self._waiting:
            buckets = self._units[self._waiting.pop(0)]
            group = self.mesh.required_group(buckets[0].kind.groups.replica)
            sum_together(
                [local_rows(bucket.param.grad) for bucket in buckets],
                group,
                "dp",
                self.counter,
            )


def sum_together(
    grads: list[Tensor],
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
) -> None:
    """Sums each tensor over the group, all in one message."""
    total = all_reduce(torch.cat(grads), group, axis, counter)
    for grad, grad_sum in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(grad_sum)
