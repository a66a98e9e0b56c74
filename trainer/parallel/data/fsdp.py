"""ZeRO-3: weights are sharded too and gathered layer by layer (arXiv 1910.02054, section 5.3) by
torch's `fully_shard` (FSDP2), with our collectives and our optimizer.

A block's weights are gathered before its forward and again before its backward, one block ahead,
and its gradients are reduce-scattered after its backward: 3 Psi (n-1)/n per micro-batch. Embedding,
and final norm with head, are units of their own, gathered ahead of where they compute; they stay
gathered until their backward: 2 Psi for those. A table that both ends of a stage use belongs to the
unit of the whole stage. Under pipeline parallelism, where forwards and backwards of micro-batches
alternate, every weight is gathered once per step and freed at its end (as in torch's own
pipelines): this saves weight memory only between steps, which the plan warns about.

Hybrid sharding: when a step's last backward pass has reduced a unit's shard, the shard is summed
over the replicas while the units below compute, on a stream of its own.

The shards are the master copy, unless the host has that: then they are in `Recipe.param`, in which
blocks compute. Gradients are sent and accumulated in `Recipe.reduce`, as sums: torch's mean over
ranks is disabled. For the optimizer, the norm and checkpoints each parameter is a bucket of its own
whose shard is a range of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.comm.collectives import CommCounter, all_reduce, reduce_scatter, start_all_gather
from trainer.comm.mesh import Mesh
from trainer.compat import carry_grad_dtype, real_tensors
from trainer.errors import LayoutError
from trainer.host.memory import HostMemory
from trainer.model.stage import Stage
from trainer.parallel.params import DENSE, GradGroups, ParamInfo, ParamTable
from trainer.precision import Recipe

from .buckets import AXIS_OF_GROUP, Kind, check_classes, kind_of
from .layout import Slot


@dataclass(frozen=True)
class Rows:
    """Layout of a parameter sharded over dimension 0 in runs of ceil(rows / shards), the last ones
    shorter or empty."""

    shape: tuple[int, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot(0, 0, prod(self.shape)),)

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """[start, stop) in the parameter's flat elements."""
        run = -(-self.shape[0] // shards)
        width = prod(self.shape[1:])
        return min(index * run, self.shape[0]) * width, min(
            (index + 1) * run, self.shape[0]
        ) * width

    def rows(self, shards: int) -> list[tuple[int, int]]:
        """[start, stop) of each of `shards` in the parameter's rows."""
        width = prod(self.shape[1:])
        ranges = [self.shard(index, shards) for index in range(shards)]
        return [(start // width, stop // width) for start, stop in ranges]

    def param_ranges(self, index: int, shards: int) -> list[tuple[Slot, int, int]]:
        start, stop = self.shard(index, shards)
        return [(self.slots[0], start, stop)] if start < stop else []


class ShardedParameter:
    """One parameter as the optimizer sees it: this rank's rows and their gradient, flat."""

    def __init__(self, param: Tensor, info: ParamInfo, mesh: Mesh):
        self.param = param
        self.infos = [info]
        self.owner = info.owner
        self.shards = mesh.size(info.groups.shard)
        self.shard_index = mesh.index(info.groups.shard)
        self.layout = Rows(info.local_shape)
        self.range = self.layout.shard(self.shard_index, self.shards)
        self.kind: Kind = kind_of(param.dtype, info)
        self.param_shard = _local(param)
        self.grad_shard = self.param_shard[
            :0
        ]  # the gradient from `finish` to the next step, else empty
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
        """`stages`, in the master dtype, are sharded in place over the shard group of each
        parameter's class, which has at least two ranks. `interleaved`: forwards and backwards of
        several micro-batches alternate (a pipeline). `host`: where the summed gradients go, and
        master weights are: `stages` are in the dtype that they compute in. Raises LayoutError for a
        class that is sharded over no ranks, or that shares a module with another."""
        check_classes(list(table.values()), classes)
        self.mesh = mesh
        self.counter = counter
        self.classes = classes
        self.host = host
        ranks = {groups: _device_mesh(mesh, groups, device) for groups in classes}
        if host is not None:
            for stage in stages:
                for param in stage.parameters():
                    param.grad_dtype = recipe.reduce  # of the shard, which is narrower
        policy = MixedPrecisionPolicy(
            param_dtype=recipe.param, reduce_dtype=recipe.reduce, cast_forward_inputs=False
        )
        self.modules: list[FSDPModule] = []  # a handle of each unit, and what it consists of
        holders = list[list[nn.Module]]()
        for stage in stages:
            groups_of = {id(param): table[name].groups for name, param in stage.named_parameters()}
            blocks = list[FSDPModule]()
            for block in stage.blocks.values():
                units: list[tuple[nn.Module, GradGroups]] = [
                    *_others(block, groups_of),
                    (block, DENSE),
                ]
                self.modules += [
                    fully_shard(
                        unit,
                        mesh=ranks[groups],
                        mp_policy=policy,
                        reshard_after_forward=not interleaved,
                    )
                    for unit, groups in units
                ]
                holders += [[unit] for unit, _ in units]
                blocks.append(self.modules[-1])
            # They stay gathered: backward of a head follows its forward, an embedding's reads no
            # weights.
            shard: Any = partial(
                fully_shard, mesh=ranks[DENSE], mp_policy=policy, reshard_after_forward=False
            )
            before, behind = ([shard(unit)[0]] if unit else [] for unit in _ends(stage))
            self.modules += [*before, *behind, shard(stage)]
            holders += [*filter(None, _ends(stage)), [stage]]
            _prefetch(self.modules[-1], [*before, *blocks, *behind])
        for module in self.modules:
            if host is not None:
                carry_grad_dtype(module, recipe.reduce)
            module.set_custom_all_gather(_AllGather(counter))  # type: ignore[arg-type]  # its base class is private
            module.set_custom_reduce_scatter(_ReduceScatter(counter))  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_backward(not interleaved)
            # allocates the shards, which torch would otherwise do in the first forward
            module.unshard()
            module.reshard()
        self.buckets = [
            ShardedParameter(param, table[name], mesh)
            for stage in stages
            for name, param in stage.named_parameters()
        ]
        self._replicas = self._sum_replicas_early(holders)
        if host is not None and host.takes_gradients:
            for bucket in self.buckets:
                bucket.host_grad = host.zeros(bucket.param_shard.numel(), recipe.reduce)

    # -------------------------------------------------------------------------------------------
    #     gradients

    def expect(self, passes: int) -> None:
        """Begin a step of `passes` backward passes, each of which ends with its gradients summed
        into the shards."""
        if passes < 1:
            raise ValueError(f"a step needs at least one backward pass, not {passes}")
        for bucket in self.buckets:
            bucket.param.grad = None
            bucket.grad_shard = bucket.param_shard[:0]
        self._replicas.start(passes)

    def accumulate_grad(self, param: Tensor) -> None:
        raise NotImplementedError(
            "ZeRO-3 takes gradients from autograd alone: no schedule that splits backward"
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Free gathered weights; every `grad_shard` then holds the sum over all ranks and
        passes."""
        for module in self.modules:
            module.reshard()
        for bucket in self.buckets:
            grad = bucket.param.grad
            if grad is None:
                bucket.param.grad = grad = torch.zeros_like(
                    bucket.param, dtype=bucket.param.grad_dtype
                )
            bucket.grad_shard = _local(grad)
        self._replicas.end()
        for name in sorted(
            {name for bucket in self.buckets for name in bucket.kind.sums}
        ):  # everywhere in this order
            self._sum([bucket for bucket in self.buckets if name in bucket.kind.sums], name)
        if self.host is not None:
            for bucket in self.buckets:
                if bucket.host_grad is not None:
                    self.host.take(bucket.host_grad, bucket.grad_shard)

    def _sum_replicas_early(self, holders: list[list[nn.Module]]) -> ReplicaSums:
        """Let each unit, of the modules `holders`, tell when a backward pass has reduced its
        gradients."""
        sums = ReplicaSums(self.mesh, self.counter)
        bucket_of = {id(bucket.param): bucket for bucket in self.buckets}
        device = self.buckets[0].param_shard.device if self.buckets else torch.device("cpu")
        stream_option = (
            {"stream": torch.cuda.Stream(device)}
            if device.type == "cuda" and sums.any(self.classes)
            else {}
        )
        seen = set[int]()
        for module, unit_modules in zip(
            self.modules, holders, strict=True
        ):  # units inside others come before them
            params = {
                id(param): param
                for unit_module in unit_modules
                for param in unit_module.parameters()
            }
            unit_buckets = [bucket_of[key] for key in params if key not in seen]
            seen |= {id(bucket.param) for bucket in unit_buckets}
            if unit_buckets and self.mesh.group(unit_buckets[0].kind.groups.replica) is not None:
                module.set_all_reduce_hook(sums.unit(unit_buckets), **stream_option)
        return sums

    def _sum(self, buckets: list[ShardedParameter], name: str) -> None:
        """Sum the gradient shards over one group, in one message."""
        group = (
            self.mesh.group(name) if buckets else None
        )  # a group that nothing is summed over may not be there
        if group is not None:
            sum_together(
                [bucket.grad_shard for bucket in buckets],
                group,
                AXIS_OF_GROUP.get(name, name),
                self.counter,
            )

    # -------------------------------------------------------------------------------------------
    #     parameters

    def gather(self, bucket: ShardedParameter) -> None:
        """Nothing to do."""

    def wait_params(self) -> None:
        """Nothing to wait for."""

    def start_forward(self) -> None:
        """Nothing to wait for: each forward gathers its weights."""

    # -------------------------------------------------------------------------------------------
    #     views

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
        return [
            _local(bucket.param.grad) for bucket in self.buckets if bucket.param.grad is not None
        ]


class ReplicaSums:
    """Sums of gradient shards over the replicas of hybrid sharding, a unit a message.

    FSDP2 tells of a unit (`set_all_reduce_hook`) before it adds the shard to what earlier passes
    have left, so each unit's sum starts when the next unit is told of, or in `end`. All ranks tell
    of them in one order.
    """

    def __init__(self, mesh: Mesh, counter: CommCounter):
        self.mesh = mesh
        self.counter = counter
        self.passes = 0
        self._waiting = list[int]()
        self._units = list[list[ShardedParameter]]()
        self._told = list[int]()

    def any(self, classes: Sequence[GradGroups]) -> bool:
        return any(self.mesh.group(groups.replica) is not None for groups in classes)

    def start(self, passes: int) -> None:
        self.passes, self._told = passes, [0] * len(self._units)

    def unit(self, buckets: list[ShardedParameter]) -> Callable[[Tensor], None]:
        """What FSDP2 calls after each pass of a unit with these parameters, on the stream where it
        adds the shard."""
        number = len(self._units)
        self._units.append(buckets)

        def count_pass(shard: Tensor) -> None:
            self._told[number] += 1
            if self._told[number] == self.passes:
                self._sum()
                self._waiting.append(number)

        return count_pass

    def end(self) -> None:
        """Sum what is left: the last unit, and units without gradients in some pass."""
        self._waiting += [
            number for number, passes in enumerate(self._told) if passes < self.passes
        ]
        self._sum()

    @torch.no_grad()
    def _sum(self) -> None:
        while self._waiting:
            buckets = self._units[self._waiting.pop(0)]
            group = self.mesh.required_group(buckets[0].kind.groups.replica)
            sum_together(
                [_local(bucket.param.grad) for bucket in buckets], group, "dp", self.counter
            )


def sum_together(
    grads: list[Tensor], group: dist.ProcessGroup, axis: str, counter: CommCounter
) -> None:
    """Sum each over the group, all in one message."""
    total = all_reduce(torch.cat(grads), group, axis, counter)
    for grad, grad_sum in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(grad_sum)


def _ends(stage: Stage) -> tuple[list[nn.Module], list[nn.Module]]:
    """What computes before and after the blocks, as units; empty where it belongs to the unit of
    the whole stage: a table that both ends use, a head that several predictions use."""
    if stage.ahead or (stage.last and stage.model.tied_embeddings):
        return [], []
    first: list[nn.Module] = [stage.embed] if stage.first else []
    first += [stage.embed_positions] if stage.learned_positions else []
    return first, [stage.norm, stage.head] if stage.last else []


def _device_mesh(mesh: Mesh, groups: GradGroups, device: torch.device) -> DeviceMesh:
    group = mesh.group(groups.shard)
    if group is None:
        raise LayoutError(
            f"ZeRO-3 has no ranks to shard parameters of the class {groups.name!r} over"
        )
    with real_tensors():
        return DeviceMesh.from_group(group, device.type)


def _others(
    block: nn.Module, groups_of: dict[int, GradGroups]
) -> Iterator[tuple[nn.Module, GradGroups]]:
    """The outermost modules of a block whose parameters are all of one class other than DENSE."""
    classes = {groups_of[id(param)] for param in block.parameters()}
    if not classes or classes == {DENSE}:
        return
    if len(classes) == 1:
        yield block, classes.pop()
        return
    if {groups_of[id(param)] for param in block.parameters(recurse=False)} - {DENSE}:
        raise LayoutError(
            f"a {type(block).__name__} holds parameters of several classes: ZeRO-3 shards modules"
        )
    for child in block.children():
        yield from _others(child, groups_of)


def _prefetch(stage: FSDPModule, units: list[FSDPModule]) -> None:
    """Prefetch the next unit's weights while a unit computes, in forward and in backward."""
    if units:
        stage.set_modules_to_forward_prefetch(units[:1])
        stage.set_modules_to_backward_prefetch(units[-1:])
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def _local(tensor: Tensor | None) -> Tensor:
    """This rank's rows of a DTensor as a flat view."""
    assert tensor is not None
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
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
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
        """`op` is SUM. Synchronous: on CUDA it runs in FSDP2's own stream, concurrently with
        backward."""
        reduce_scatter(input_tensor, group, "dp", self.counter, out=output_tensor)
