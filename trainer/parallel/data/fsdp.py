"""ZeRO-3: weights are sharded too and gathered layer by layer (arXiv 1910.02054, section 5.3) by
torch's `fully_shard` (FSDP2), with our collectives and our optimizer.

A block's weights are gathered before its forward and again before its backward, one block ahead,
and its gradients are reduce-scattered after its backward: 3 Psi (n-1)/n per micro-batch. The
embedding is a unit of its own, and so is the final norm with the head. They are gathered before
they compute and stay gathered until their backward: 2 Psi for those. A table that both ends of a
stage use belongs to the unit of the whole stage. Under pipeline parallelism, where forwards and
backwards of micro-batches alternate, every weight is gathered once per step and freed at the end of
the step (as in torch's own pipelines): this saves weight memory only between steps, which the plan
warns about.

Hybrid sharding: when a step's last backward pass has reduced a unit's shard, a stream of its own
sums the shard over the replicas while the units below compute.

The shards are the master copy, unless the host holds that: then they are in `Recipe.param`, in
which blocks compute. Gradients are sent and accumulated in `Recipe.reduce`, as sums: torch's mean
over ranks is disabled. The optimizer, the norm and checkpoints see each parameter as a bucket whose
shard is a range of rows. Shards may be outside the device's memory (`fsdp_offload`).

A model that fits nowhere as a whole can start: the initial weights of one unit at a time are made,
and only their shards are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh, lone_group
from trainer.compat import real_tensors
from trainer.compat.sharded import carry_grad_dtype
from trainer.errors import LayoutError
from trainer.host.memory import HostMemory
from trainer.model.stage import Stage
from trainer.parallel.params import DENSE, GradGroups, ParamInfo, ParamTable
from trainer.precision import Recipe

from .buckets import AXIS_OF_GROUP, check_classes
from .fsdp_collectives import FsdpAllGather, FsdpReduceScatter
from .fsdp_offload import ShardsAway
from .replica_sums import ReplicaSums, sum_together
from .sharded_parameter import ShardedParameter, local_rows

#: (stage, registry of some of its parameters): allocates these parameters whole on the device, with
#: their initial weights.
Fill = Callable[[Stage, ParamTable], None]


class FullyShardedParameters:
    """ZeRO-3 behind the interface of `GradBuckets`."""

    zero = 3
    gathers = False  # each forward gathers its weights

    def __init__(
        self,
        stages: Sequence[Stage],
        table: ParamTable,
        mesh: Mesh,
        *,
        recipe: Recipe,
        counter: CommCounter,
        device: torch.device,
        interleaved: bool,
        classes: Sequence[GradGroups] = (DENSE,),
        host: HostMemory | None = None,
        away: bool = False,
        fill: Fill | None = None,
    ):
        """Shards `stages`, in the master dtype, in place over the shard group of each parameter's
        class. A parameter that no other rank holds is whole in its shard.

        `interleaved`: forwards and backwards of several micro-batches alternate (a pipeline).
        `host`: receives the summed gradients and holds the master weights; `stages` are then in the
        dtype in which they compute. `away`: it holds the shards of weights and gradients, too.
        `fill`: makes the weights of a unit, if `stages` have shapes alone.

        Raises LayoutError for a class that shares a module with another class.
        """
        check_classes(list(table.values()), classes)
        self.mesh = mesh
        self.counter = counter
        self.classes = classes
        self.host = host
        self._table = table
        self._fill = fill
        self._recipe = recipe
        self._away = ShardsAway(host, mesh, counter) if host is not None and away else None
        self._device_meshes = {groups: _device_mesh(mesh, groups, device) for groups in classes}
        self.modules: list[FSDPModule] = []  # the units that FSDP2 shards
        holders = list[list[nn.Module]]()  # the modules of each unit
        for stage in stages:
            groups_of = {id(param): table[name].groups for name, param in stage.named_parameters()}
            holders += self._shard_stage(stage, groups_of, reshard=not interleaved)
        for module in self.modules:
            self._set_collectives(module, reshard=not interleaved)
        self.buckets = [
            ShardedParameter(param, table[name], mesh)
            for stage in stages
            for name, param in stage.named_parameters()
        ]
        self._replicas = ReplicaSums(mesh, counter)
        if self._away is not None:
            self._away.take_gradients(self.buckets, recipe.reduce)
        else:
            self._sum_replicas_early(holders)
            self._allocate_host_gradients()

    def _allocate_host_gradients(self) -> None:
        """Allocates the gradients of an optimizer on the host."""
        host = self.host
        if host is not None and host.takes_gradients:
            for bucket in self.buckets:
                bucket.host_grad = host.zeros(bucket.param_shard.numel(), self._recipe.reduce)

    def _shard_stage(
        self,
        stage: Stage,
        groups_of: dict[int, GradGroups],
        *,
        reshard: bool,
    ) -> list[list[nn.Module]]:
        """Shards the units of a stage. Returns the modules of each unit."""
        holders = list[list[nn.Module]]()
        blocks = list[FSDPModule]()
        for block in stage.blocks.values():
            for unit, groups in [*_units_of_other_classes(block, groups_of), (block, DENSE)]:
                self.modules.append(self._shard(stage, [unit], groups, reshard=reshard))
                holders.append([unit])
            blocks.append(self.modules[-1])
        # The ends stay gathered: a head's backward follows its forward, an embedding's reads no
        # weights.
        first_end, last_end = _ends(stage)
        first = [self._shard(stage, first_end)] if first_end else []
        last = [self._shard(stage, last_end)] if last_end else []
        whole_stage = self._shard(stage, [stage])
        self.modules += [*first, *last, whole_stage]
        holders += [*filter(None, (first_end, last_end)), [stage]]
        _prefetch(whole_stage, [*first, *blocks, *last])
        return holders

    def _shard(
        self,
        stage: Stage,
        unit: list[nn.Module],
        groups: GradGroups = DENSE,
        *,
        reshard: bool = False,
    ) -> FSDPModule:
        """Shards one unit of a stage; `reshard`: frees its gathered weights after a forward."""
        self._make_weights(stage, unit)
        policy = MixedPrecisionPolicy(
            param_dtype=self._recipe.param,
            reduce_dtype=self._recipe.reduce,
            cast_forward_inputs=False,
        )
        options: dict[str, Any] = {}
        if self._away is not None:
            options["offload_policy"] = self._away.policy
        module = fully_shard(
            unit,
            mesh=self._device_meshes[groups],
            mp_policy=policy,
            reshard_after_forward=reshard,
            **options,
        )[0]
        if self._away is not None:
            self._away.move(module)
        return module

    def _make_weights(self, stage: Stage, unit: list[nn.Module]) -> None:
        """Makes the weights of a unit whole, without those of units inside it."""
        members = {
            id(param)
            for module in unit
            for param in module.parameters()
            if not isinstance(param, DTensor)
        }
        names = [name for name, param in stage.named_parameters() if id(param) in members]
        if self._fill is not None:
            self._fill(stage, {name: self._table[name] for name in names})
        if self.host is not None:
            for name in names:
                # That of the shard, which is narrower.
                stage.get_parameter(name).grad_dtype = self._recipe.reduce

    def _set_collectives(
        self,
        module: FSDPModule,
        *,
        reshard: bool,
    ) -> None:
        """Makes a unit use our collectives, and sums in place of means."""
        if self.host is not None:
            carry_grad_dtype(module, self._recipe.reduce)
        # The base class of these arguments is private.
        module.set_custom_all_gather(FsdpAllGather(self.counter))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(FsdpReduceScatter(self.counter))  # type: ignore[arg-type]
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(reshard)
        # This allocates the shards, which torch would otherwise do in the first forward.
        module.unshard()
        module.reshard()

    # -------------------------------------------------------------------------------------------
    #     gradients

    def expect(self, passes: int) -> None:
        """Begins a step of `passes` backward passes, each of which sums its gradients into the
        shards."""
        if passes < 1:
            raise ValueError(f"a step needs at least one backward pass, not {passes}")
        if self._away is not None:
            self._away.start()
            return
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
        """Frees gathered weights. Every `grad_shard` then holds the sum over all ranks and
        passes."""
        for module in self.modules:
            module.reshard()
        if self._away is not None:
            self._away.finish()
            return
        for bucket in self.buckets:
            param = bucket.param
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
            bucket.grad_shard = local_rows(param.grad)
        self._replicas.end()
        # All ranks sum over the groups in this order.
        for name in sorted({name for bucket in self.buckets for name in bucket.kind.sums}):
            self._sum([bucket for bucket in self.buckets if name in bucket.kind.sums], name)
        if self.host is not None:
            for bucket in self.buckets:
                if bucket.host_grad is not None:
                    self.host.take(bucket.host_grad, bucket.grad_shard)

    def _sum_replicas_early(self, holders: list[list[nn.Module]]) -> None:
        """Starts each unit's sum over the replicas when a backward pass has reduced its gradients.
        `holders`: the modules of each unit."""
        sums = self._replicas
        bucket_of = {id(bucket.param): bucket for bucket in self.buckets}
        device = self.buckets[0].param_shard.device if self.buckets else torch.device("cpu")
        stream: dict[str, torch.cuda.Stream] = {}
        if device.type == "cuda" and sums.any(self.classes):
            stream = {"stream": torch.cuda.Stream(device)}
        seen = set[int]()
        # Units inside others come before them.
        for module, unit_modules in zip(self.modules, holders, strict=True):
            params = {id(param): param for unit in unit_modules for param in unit.parameters()}
            unit_buckets = [bucket_of[key] for key in params if key not in seen]
            seen |= {id(bucket.param) for bucket in unit_buckets}
            if not unit_buckets:
                continue
            if self.mesh.group(unit_buckets[0].kind.groups.replica) is not None:
                module.set_all_reduce_hook(sums.unit(unit_buckets), **stream)

    def _sum(self, buckets: list[ShardedParameter], name: str) -> None:
        """Sums the gradient shards over one group, in one message."""
        # A group that nothing is summed over may not exist.
        group = self.mesh.group(name) if buckets else None
        if group is not None:
            grads = [bucket.grad_shard for bucket in buckets]
            sum_together(grads, group, AXIS_OF_GROUP.get(name, name), self.counter)

    # -------------------------------------------------------------------------------------------
    #     parameters

    def gather(self, bucket: ShardedParameter) -> None:
        """Does nothing: each forward gathers its weights."""

    def wait_params(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def start_forward(self) -> None:
        """Does nothing: each forward gathers its weights."""

    # -------------------------------------------------------------------------------------------
    #     views

    def full_grads(self) -> dict[str, Tensor]:
        """Returns the whole summed gradients by parameter name: for verification only."""
        return {bucket.infos[0].name: bucket.whole_grad() for bucket in self.buckets}

    def full_params(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Yields every parameter whole, gathered: for verification only."""
        for bucket in self.buckets:
            yield bucket.infos[0], bucket.whole_param()

    def param_tensors(self) -> list[Tensor]:
        """The shards' storage on the device, for memory metrics."""
        if self._away is not None:
            return []
        return [bucket.param_shard for bucket in self.buckets]

    def buffer_tensors(self) -> list[Tensor]:
        """Returns nothing: what is gathered is freed within a step."""
        return []

    def grad_tensors(self) -> list[Tensor]:
        """The gradient shards' storage, for memory metrics."""
        return [
            local_rows(bucket.param.grad)
            for bucket in self.buckets
            if bucket.param.grad is not None
        ]


def _ends(stage: Stage) -> tuple[list[nn.Module], list[nn.Module]]:
    """Returns the modules that compute before the blocks, and those after them. Both are empty if
    they belong to the unit of the whole stage: a table that both ends use, or a head that several
    predictions use."""
    if stage.ahead or (stage.last and stage.model.tied_embeddings):
        return [], []
    return stage.embeddings, stage.head_modules


def _device_mesh(mesh: Mesh, groups: GradGroups, device: torch.device) -> DeviceMesh:
    """Returns the ranks that shard a class of parameters: this one alone if no other rank holds
    them, such as experts that are as many as the ranks."""
    group = mesh.group(groups.shard) or lone_group(mesh.rank)
    with real_tensors():
        return DeviceMesh.from_group(group, device.type)


def _units_of_other_classes(
    block: nn.Module, groups_of: dict[int, GradGroups]
) -> Iterator[tuple[nn.Module, GradGroups]]:
    """Yields the outermost modules of a block whose parameters all have one class other than
    DENSE."""
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
        yield from _units_of_other_classes(child, groups_of)


def _prefetch(stage: FSDPModule, units: list[FSDPModule]) -> None:
    """Prefetches the next unit's weights while a unit computes, in forward and in backward."""
    if units:
        stage.set_modules_to_forward_prefetch(units[:1])
        stage.set_modules_to_backward_prefetch(units[-1:])
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
