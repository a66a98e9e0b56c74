"""ZeRO-3: weights are sharded too and gathered layer by layer (arXiv 1910.02054, section 5.3) by torch's `fully_shard`
(FSDP2), with our collectives and our optimizer.

A block's weights are gathered before its forward and again before its backward, one block ahead, and its gradients are
reduce-scattered after its backward: 3 Psi (n-1)/n per micro-batch. Embedding, final norm and head stay gathered in
between: 2 Psi for those. Under pipeline parallelism, where forwards and backwards of micro-batches alternate, every
weight is gathered once per step and freed at its end (as in torch's own pipelines): this saves weight memory only
between steps, which the plan warns about.

The shards are the master copy; blocks compute in `Recipe.param`, and gradients are sent and accumulated in
`Recipe.reduce`, as sums: torch's mean over ranks is disabled. For the optimizer, the norm and checkpoints each
parameter is a bucket of its own whose shard is a range of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.comm.collectives import CommCounter, all_reduce, reduce_scatter, start_all_gather
from trainer.comm.mesh import Mesh
from trainer.compat import real_tensors
from trainer.errors import LayoutError
from trainer.host import HostMemory
from trainer.model.stage import Stage
from trainer.parallel.params import DENSE, GradGroups, ParamInfo, ParamTable
from trainer.precision import Recipe

from .buckets import AXIS_OF_GROUP, Kind, check_classes, kind_of
from .layout import Slot


@dataclass(frozen=True)
class Rows:
    """Layout of a parameter sharded over dimension 0 in runs of ceil(rows / shards), the last ones shorter or empty."""

    shape: tuple[int, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot(0, 0, prod(self.shape)),)

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """[start, stop) in the parameter's flat elements."""
        run, width = -(-self.shape[0] // shards), prod(self.shape[1:])
        return min(index * run, self.shape[0]) * width, min((index + 1) * run, self.shape[0]) * width

    def pieces(self, index: int, shards: int) -> list[tuple[Slot, int, int]]:
        start, stop = self.shard(index, shards)
        return [(self.slots[0], start, stop)] if start < stop else []


class ShardedParameter:
    """One parameter as the optimizer sees it: this rank's rows and their gradient, flat."""

    def __init__(self, param: Tensor, info: ParamInfo, mesh: Mesh):
        self.param, self.infos, self.owner = param, [info], info.owner
        self.shards, self.shard_index = mesh.size(info.groups.shard), mesh.index(info.groups.shard)
        self.layout = Rows(info.local_shape)
        self.range = self.layout.shard(self.shard_index, self.shards)
        self.kind: Kind = kind_of(param.dtype, info)
        self.param_shard = _local(param)
        self.grad_shard = self.param_shard[:0]  # the gradient from `finish` to the next step, else empty
        self.host_grad: Tensor | None = None


class FullyShardedParameters:
    """ZeRO-3 behind the interface of `GradBuckets`."""

    zero = 3
    gathers = False  # each forward gathers its weights

    def __init__(
        self,
        stages: Sequence[Stage],
        table: ParamTable,
        mesh: Mesh,
        recipe: Recipe,
        counter: CommCounter,
        device: torch.device,
        interleaved: bool,
        classes: Sequence[GradGroups] = (DENSE,),
        host: HostMemory | None = None,
    ):
        """`stages`, in the master dtype, are sharded in place over the shard group of each parameter's class, which has
        at least two ranks. `interleaved`: forwards and backwards of several micro-batches alternate (a pipeline).
        `host`: where the summed gradients go. Raises LayoutError for a class that is sharded over no ranks, or that
        shares a module with another."""
        check_classes(list(table.values()), classes)
        self.mesh, self.counter, self.classes, self.host = mesh, counter, classes, host
        ranks = {groups: _device_mesh(mesh, groups, device) for groups in classes}
        policy = MixedPrecisionPolicy(param_dtype=recipe.param, reduce_dtype=recipe.reduce, cast_forward_inputs=False)
        self.modules: list[FSDPModule] = []
        for stage in stages:
            of = {id(param): table[name].groups for name, param in stage.named_parameters()}
            blocks = list[FSDPModule]()
            for block in stage.blocks.values():
                units: list[tuple[nn.Module, GradGroups]] = [*_others(block, of), (block, DENSE)]
                self.modules += [
                    fully_shard(unit, mesh=ranks[groups], mp_policy=policy, reshard_after_forward=not interleaved)
                    for unit, groups in units
                ]
                blocks.append(self.modules[-1])
            whole = fully_shard(stage, mesh=ranks[DENSE], mp_policy=policy, reshard_after_forward=False)
            _prefetch(whole, blocks)
            self.modules.append(whole)
        for module in self.modules:
            module.set_custom_all_gather(_AllGather(counter))  # type: ignore[arg-type]  # its base class is private
            module.set_custom_reduce_scatter(_ReduceScatter(counter))  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not interleaved)
            module.unshard()  # allocates the shards, which torch would otherwise do in the first forward
            module.reshard()
        self.buckets = [
            ShardedParameter(param, table[name], mesh) for stage in stages for name, param in stage.named_parameters()
        ]
        if host is not None and host.takes_gradients:
            for bucket in self.buckets:
                bucket.host_grad = host.zeros(bucket.param_shard.numel(), recipe.reduce)

    # ------------------------------------------------------------------------------------------- gradients

    def expect(self, passes: int) -> None:
        """Begin a step of `passes` backward passes, each of which ends with its gradients summed into the shards."""
        if passes < 1:
            raise ValueError(f"a step needs at least one backward pass, not {passes}")
        for bucket in self.buckets:
            bucket.param.grad, bucket.grad_shard = None, bucket.param_shard[:0]

    def on_grad(self, param: Tensor) -> None:
        raise NotImplementedError("ZeRO-3 takes gradients from autograd alone: no schedule that splits backward")

    @torch.no_grad()
    def finish(self) -> None:
        """Free gathered weights; every `grad_shard` then holds the sum over all ranks and passes."""
        for module in self.modules:
            module.reshard()
        for bucket in self.buckets:
            grad = bucket.param.grad
            if grad is None:
                bucket.param.grad = grad = torch.zeros_like(bucket.param)
            bucket.grad_shard = _local(grad)
        for groups in self.classes:
            self._sum([bucket for bucket in self.buckets if bucket.kind.groups == groups], groups.replica)
        for name in sorted({name for bucket in self.buckets for name in bucket.kind.sums}):  # everywhere in this order
            self._sum([bucket for bucket in self.buckets if name in bucket.kind.sums], name)
        if self.host is not None:
            for bucket in self.buckets:
                if bucket.host_grad is not None:
                    self.host.take(bucket.host_grad, bucket.grad_shard)

    def _sum(self, buckets: list[ShardedParameter], name: str) -> None:
        """Sum the gradient shards over one group, in one message."""
        group = self.mesh.group(name) if buckets else None  # a group that nothing is summed over may not be there
        if group is None:
            return
        grads = [bucket.grad_shard for bucket in buckets]
        total = all_reduce(torch.cat(grads), group, AXIS_OF_GROUP.get(name, name), self.counter)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part)

    # ------------------------------------------------------------------------------------------- parameters

    def gather(self, bucket: ShardedParameter) -> None:
        """Nothing to do."""

    def wait_params(self) -> None:
        """Nothing to wait for."""

    def start_forward(self) -> None:
        """Nothing to wait for: each forward gathers its weights."""

    # ------------------------------------------------------------------------------------------- views

    def full_grads(self) -> dict[str, Tensor]:
        """Every parameter's whole summed gradient by name: for verification only."""
        return {bucket.infos[0].name: _full(bucket.param.grad) for bucket in self.buckets}

    def full_params(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Every parameter whole, gathered: for verification only."""
        for bucket in self.buckets:
            yield bucket.infos[0], _full(bucket.param.detach())

    def param_tensors(self) -> list[Tensor]:
        """The shards' storage, for memory metrics."""
        return [bucket.param_shard for bucket in self.buckets]

    def grad_tensors(self) -> list[Tensor]:
        """The gradient shards' storage, for memory metrics."""
        return [_local(bucket.param.grad) for bucket in self.buckets if bucket.param.grad is not None]


def _device_mesh(mesh: Mesh, groups: GradGroups, device: torch.device) -> DeviceMesh:
    group = mesh.group(groups.shard)
    if group is None:
        raise LayoutError(f"ZeRO-3 has no ranks to shard parameters of the class {groups.name!r} over")
    with real_tensors():
        return DeviceMesh.from_group(group, device.type)


def _others(block: nn.Module, groups_of: dict[int, GradGroups]) -> Iterator[tuple[nn.Module, GradGroups]]:
    """The outermost modules of a block whose parameters are all of one class other than DENSE."""
    found = {groups_of[id(param)] for param in block.parameters()}
    if not found or found == {DENSE}:
        return
    if len(found) == 1:
        yield block, found.pop()
        return
    if {groups_of[id(param)] for param in block.parameters(recurse=False)} - {DENSE}:
        raise LayoutError(f"a {type(block).__name__} holds parameters of several classes: ZeRO-3 shards modules")
    for child in block.children():
        yield from _others(child, groups_of)


def _prefetch(stage: FSDPModule, blocks: list[FSDPModule]) -> None:
    """Prefetch the next block's weights while a block computes, in forward and in backward."""
    if blocks:
        stage.set_modules_to_forward_prefetch(blocks[:1])
        stage.set_modules_to_backward_prefetch(blocks[-1:])
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a DTensor as a flat view."""
    return cast(DTensor, tensor.detach()).to_local().view(-1)


def _full(tensor: Tensor | None) -> Tensor:
    """The whole of a DTensor, gathered."""
    return cast(DTensor, tensor).full_tensor()


class _Communication:
    """Base of the custom collectives that FSDP2 calls: it asks them for buffers too."""

    def __init__(self, counter: CommCounter):
        self.counter = counter

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Communication):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        handle = start_all_gather(input_tensor, group, "dp", self.counter, out=output_tensor)
        if async_op:
            return handle.work
        handle.wait()
        return None


class _ReduceScatter(_Communication):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """`op` is SUM. Synchronous: on CUDA it runs in FSDP2's own stream, concurrently with backward."""
        reduce_scatter(input_tensor, group, "dp", self.counter, out=output_tensor)
