"""What one rank holds of each parameter: the registry that gradients, optimizer, norms and checkpoints read.

A parameter is known by its full global name (`layers.17.attn.wq.weight`) and its full global shape, on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as one rank sees it. Indices count elements along `shard_dim` of the global tensor."""

    name: str
    global_shape: tuple[int, ...]
    shard_dim: int | None  # dimension cut by tensor parallelism; None: every tp rank holds the whole tensor
    start: int  # [start, stop) of the unpadded global `shard_dim` is here; empty for a shard of padding only
    stop: int
    padded: int  # local size of `shard_dim`, padding at its end included
    tp_partial_grad: bool  # several tp ranks hold it, each with a part of its gradient: sum over `grad_sum_group`
    replicas: tuple[int, ...]  # tp coordinates that hold this same slice
    owner: bool  # this rank counts it in norms and writes it in checkpoints
    decay: bool  # weight decay applies: matrices yes, norms and biases no
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
        """Where the valid part of the local tensor lies in the global one (what a checkpoint records)."""
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
    """A parameter that this rank holds alone and entirely: no tensor parallelism."""
    return ParamInfo(
        **{"name": name, "global_shape": tuple(shape), "shard_dim": None, "start": 0, "stop": shape[0]},
        **{"padded": shape[0], "tp_partial_grad": False, "replicas": (0,), "owner": True, "decay": len(shape) > 1},
    )
