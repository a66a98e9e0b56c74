"""The registry of one rank's parameter slices, read by gradients, optimizer, norms and checkpoints.

A parameter has the same global name (`layers.17.attn.wq.weight`) and global shape on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor

#: What is stored of a parameter: its weights, the optimizer's master copy of them, and its moments.
StateKind = Literal["param", "master", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as one rank sees it. Indices count elements along `shard_dim` of the global tensor."""

    name: str
    global_shape: tuple[int, ...]
    shard_dim: int | None  # dimension cut by tensor parallelism; None: every tp rank holds the whole tensor
    start: int  # this rank holds [start, stop) of the unpadded `shard_dim`; empty for a shard of padding only
    stop: int
    padded: int  # local size of `shard_dim`, padding at its end included
    tp_partial_grad: bool  # held by several tp ranks, each with a partial gradient: sum over `grad_sum_group`
    replicas: tuple[int, ...]  # tp coordinates that hold this same slice
    owner: bool  # this rank counts it in norms and writes it to checkpoints
    decay: bool  # weight decay applies: to matrices, not to norms and biases
    tied: bool = False  # first and last stage hold copies: sum the gradient over the group "embedding"

    @property
    def grad_sum_group(self) -> str | None:
        """Mesh axis over which the gradient is summed before data parallelism: "tp", "kv" or None."""
        if not self.tp_partial_grad:
            return None
        return "tp" if self.shard_dim is None else "kv"

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.padded if dim == self.shard_dim else size for dim, size in enumerate(self.global_shape))

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Position of the local tensor without padding in the global one."""
        ranges = [slice(0, size) for size in self.global_shape]
        if self.shard_dim is not None:
            ranges[self.shard_dim] = slice(self.start, max(self.start, self.stop))
        return tuple(ranges)

    @property
    def numel(self) -> int:
        """Elements of the local tensor, padding included."""
        return prod(self.local_shape)

    def valid(self, local: Tensor) -> Tensor:
        """The local tensor without its padding (a view)."""
        if self.shard_dim is None:
            return local
        return local.narrow(self.shard_dim, 0, max(0, self.stop - self.start))

    def take(self, full: Tensor) -> Tensor:
        """This rank's slice of a global tensor, as a new tensor with zeros for padding."""
        local = full.new_zeros(self.local_shape)
        self.valid(local).copy_(full[self.global_slices])
        return local


ParamTable = dict[str, ParamInfo]


def whole(name: str, shape: tuple[int, ...]) -> ParamInfo:
    """ParamInfo of a parameter that is not sharded by tensor parallelism."""
    return ParamInfo(name, tuple(shape), None, 0, shape[0], shape[0], False, (0,), owner=True, decay=len(shape) > 1)
