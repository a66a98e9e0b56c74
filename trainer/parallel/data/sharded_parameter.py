"""A parameter of ZeRO-3 as the optimizer, the norm and checkpoints see it: a bucket whose shard is
a range of rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.comm.mesh import Mesh
from trainer.parallel.params import ParamInfo

from .buckets import Kind, kind_of
from .layout import Slot


@dataclass(frozen=True)
class Rows:
    """The layout of a parameter that is sharded over dimension 0 in runs of ceil(rows / shards), of
    which the last ones are shorter or empty."""

    shape: tuple[int, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot(0, 0, prod(self.shape)),)

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """Returns a shard's [start, stop) in the parameter's flat elements."""
        height = self.shape[0]
        run = -(-height // shards)
        width = prod(self.shape[1:])
        start = min(index * run, height)
        stop = min((index + 1) * run, height)
        return start * width, stop * width

    def rows(self, shards: int) -> list[tuple[int, int]]:
        """Returns [start, stop) of each of `shards` in the parameter's rows."""
        width = prod(self.shape[1:])
        ranges = [self.shard(index, shards) for index in range(shards)]
        return [(start // width, stop // width) for start, stop in ranges]

    def param_ranges(self, index: int, shards: int) -> list[tuple[Slot, int, int]]:
        start, stop = self.shard(index, shards)
        return [(self.slots[0], start, stop)] if start < stop else []


class ShardedParameter:
    """A parameter as the optimizer sees it: this rank's rows and their gradient, flat."""

    def __init__(self, param: Tensor, info: ParamInfo, mesh: Mesh):
        self.param = param
        self.infos = [info]
        self.owner = info.owner
        self.shards = mesh.size(info.groups.shard)
        self.shard_index = mesh.index(info.groups.shard)
        self.layout = Rows(info.local_shape)
        self.range = self.layout.shard(self.shard_index, self.shards)
        self.kind: Kind = kind_of(param.dtype, info)
        self.param_shard = local_rows(param)
        #: The gradient from `finish` to the next step, else empty.
        self.grad_shard = self.param_shard[:0]
        self.host_grad: Tensor | None = None

    def whole_param(self) -> Tensor:
        """Returns the whole parameter, gathered: for verification only."""
        return self._whole(self.param_shard)

    def whole_grad(self) -> Tensor:
        """Returns the whole gradient, gathered: for verification only."""
        return self._whole(self.grad_shard)

    def _whole(self, shard: Tensor) -> Tensor:
        param = cast(DTensor, self.param)
        local = shard.view(param.to_local().shape).to(param.device_mesh.device_type)
        whole = DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )
        return whole.full_tensor()


def local_rows(tensor: Tensor | None) -> Tensor:
    """Returns this rank's rows of a DTensor as a flat view."""
    assert tensor is not None
    return cast(DTensor, tensor.detach()).to_local().view(-1)
