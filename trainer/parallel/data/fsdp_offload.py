"""ZeRO-3 with its shards outside the device's memory (ZeRO-Infinity, arXiv 2104.07857, section
5.1.1): in host memory, page-locked on CUDA, or in mapped pages of a disk.

The device holds no shard of weights or gradients, only the units that are gathered: the one that
computes, and the next one in the order of use.

    weights     host -> device when a unit is gathered, in FSDP2's stream of copies
    gradients   device -> host after each reduce-scatter of a unit, in the host's stream of copies;
                earlier sums of the step come back to be added to, in the same stream

A unit's shards are one tensor on the host. A parameter that one rank holds alone has no gather that
could bring it, so the plan refuses experts with one holder each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn import Parameter

from trainer.comm.collectives import CommCounter, reduce_scatter
from trainer.comm.mesh import Mesh
from trainer.compat.sharded import move_shards
from trainer.host.memory import HostMemory

from .buckets import axis_of_sum
from .fsdp_collectives import FsdpReduceScatter
from .replica_sums import sum_together
from .sharded_parameter import ShardedParameter


class ShardsAway:
    """The shards of all units, outside the device's memory."""

    #: FSDP2 copies weights from the host. It would lock their pages itself, one by one.
    policy = CPUOffloadPolicy(pin_memory=False)

    def __init__(self, host: HostMemory, mesh: Mesh, counter: CommCounter):
        self.host = host
        self.mesh = mesh
        self.counter = counter
        self.units: list[UnitReduceScatter] = []
        #: Units with their parameters and the elements of these parameters' shards.
        self._moved: list[tuple[FSDPModule, list[tuple[Parameter, int]]]] = []

    def move(self, module: FSDPModule) -> None:
        """Moves the shards of a unit that has just been sharded."""
        self._moved.append((module, move_shards(module, self.host.shard)))

    def take_gradients(self, buckets: Sequence[ShardedParameter], dtype: torch.dtype) -> None:
        """Makes the gradients of all units leave the device, in `dtype`."""
        bucket_of = {id(bucket.param): bucket for bucket in buckets}
        for module, members in self._moved:
            if not members:
                continue
            unit_buckets = [bucket_of[id(param)] for param, _ in members]
            self._allocate_gradients(unit_buckets, dtype)
            sizes = [size for _, size in members]
            unit = UnitReduceScatter(self.counter, self.host, unit_buckets, sizes)
            module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]
            self.units.append(unit)

    def _allocate_gradients(self, buckets: list[ShardedParameter], dtype: torch.dtype) -> None:
        sizes = [bucket.param_shard.numel() for bucket in buckets]
        runs = self.host.shard(sum(sizes), dtype).split(sizes)
        for bucket, run in zip(buckets, runs, strict=True):
            bucket.grad_shard = run
            if self.host.takes_gradients:
                bucket.host_grad = run
            bucket.param.register_post_accumulate_grad_hook(_forget)

    def start(self) -> None:
        """Begins a step."""
        for unit in self.units:
            unit.passes = 0

    def finish(self) -> None:
        """Waits until every `grad_shard` holds the sum over all ranks and passes. One unit's shards
        at a time are back on the device to be summed over further groups."""
        for unit in self.units:
            if not unit.passes:
                for bucket in unit.buckets:
                    bucket.grad_shard.zero_()
        buckets = [bucket for unit in self.units for bucket in unit.buckets]
        # All ranks sum over the groups in this order: replicas, then second sums.
        replicas = sorted({bucket.kind.groups.replica for bucket in buckets})
        for name in (*replicas, *sorted({name for bucket in buckets for name in bucket.kind.sums})):
            for unit in self.units:
                unit.sum_over(name, self.mesh)
        self.host.wait()


class UnitReduceScatter(FsdpReduceScatter):
    """The reduce-scatter of a unit whose gradients leave the device at once."""

    def __init__(
        self,
        counter: CommCounter,
        host: HostMemory,
        buckets: list[ShardedParameter],
        sizes: list[int],
    ):
        """`sizes`: the elements of each bucket's shard, including padding."""
        super().__init__(counter)
        self.host = host
        self.buckets = buckets
        self.sizes = sizes
        self.passes = 0  # of this step, whose sums the host holds

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Returns the memory of an input on the device, or of an output. FSDP2 makes the output a
        gradient of shards that are on the host, so it is there, too. Nobody reads or writes it on
        CUDA."""
        is_output = list(size) == [sum(self.sizes)]
        return super().allocate(
            size, dtype=dtype, device=torch.device("cpu") if is_output else device
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sums the gradients over the group, and sends this rank's shards to the host, added to
        those of earlier passes. Runs in FSDP2's stream of reductions.

        Raises RuntimeError if a parameter of the unit has no gradient.
        """
        if output_tensor.numel() != sum(self.sizes):
            raise RuntimeError("a unit of ZeRO-3 has gradients of some of its parameters only")
        sums = output_tensor
        if sums.device != input_tensor.device:
            sums = torch.empty_like(output_tensor, device=input_tensor.device)
        reduce_scatter(input_tensor, group, "dp", self.counter, out=sums)
        earlier = [self._back_on_device(bucket) for bucket in self.buckets] if self.passes else []
        for number, shard in enumerate(sums.split(self.sizes)):
            bucket = self.buckets[number]
            grad = shard[: bucket.grad_shard.numel()]  # without padding
            if earlier:
                grad.add_(earlier[number])
            self._send(bucket, grad)
        self.passes += 1

    def _back_on_device(self, bucket: ShardedParameter) -> Tensor:
        """Brings a gradient back. The current stream waits for it, the host does not."""
        shard = bucket.grad_shard
        grad = self.host.device_tensor(shard.shape, shard.dtype)
        return self.host.arrived(grad, self.host.bring(shard, grad))

    def _send(self, bucket: ShardedParameter, grad: Tensor) -> None:
        if self.host.takes_gradients:
            self.host.take(bucket.grad_shard, grad)
        else:
            self.host.write(grad, bucket.grad_shard)

    def sum_over(self, name: str, mesh: Mesh) -> None:
        """Sums the shards of those parameters over a mesh group that are to be summed over it."""
        group = mesh.group(name)
        buckets = [
            bucket
            for bucket in self.buckets
            if name in (bucket.kind.groups.replica, *bucket.kind.sums)
        ]
        if group is None or not buckets:
            return
        grads = [self._back_on_device(bucket) for bucket in buckets]
        axis = axis_of_sum(name, buckets[0].kind.groups)
        sum_together(grads, group, axis, self.counter)
        for bucket, grad in zip(buckets, grads, strict=True):
            self._send(bucket, grad)


def _forget(param: Tensor) -> None:
    """Frees a gradient that FSDP2 has set. The host has its values."""
    param.grad = None
