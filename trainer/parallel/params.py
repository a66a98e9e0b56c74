"""The registry of one rank's parameter slices, read by gradients, optimizer, norms and checkpoints.

A parameter has the same global name (`layers.17.attn.wq.weight`) and global shape on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

#: What is stored of a parameter: "master", its weights in the optimizer's precision, and what the
#: optimizer's rule keeps ("exp_avg" and "exp_avg_sq", or "momentum"). "state" is what modules keep
#: without gradient, under names of its own.
StateKind = str
#: Weights that lack the last update, of a run whose updates are delayed. Other checkpoints do not
#: have them.
STALE = "stale"


@dataclass(frozen=True)
class Shard:
    """One dimension of a parameter, cut over the ranks of a mesh axis. Indices count its
    elements."""

    dim: int
    start: int  # this rank holds [start, stop) without padding; empty for padding only
    stop: int
    padded: int  # local size, padding at its end included
    axis: str = "tp"


@dataclass(frozen=True)
class GradGroups:
    """A class of parameters: the mesh groups of all its gradients. Experts, of which ranks of one
    dense group hold different ones, are a class of their own."""

    name: str
    # ranks that hold the same parameters and see other tokens: gradients are summed over it
    grad: str
    shard: str  # those of `grad` that together hold one copy of what ZeRO shards
    replica: str  # those of `grad` with the same shard (hybrid sharding)
    # ranks that together hold every parameter of the class once: the norm's squares are summed over
    # it
    model: str


DENSE = GradGroups("dense", grad="grad", shard="shard", replica="replica", model="model")
EXPERT = GradGroups("expert", "expert_grad", "expert_shard", "expert_replica", "expert_model")


def classes_of(spread: int) -> tuple[GradGroups, ...]:
    """The classes of a plan's parameters: where no ranks of a dense group hold different experts
    (`spread`: how many do), these are dense ones."""
    return (DENSE, EXPERT) if spread > 1 else (DENSE,)


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as one rank sees it."""

    name: str
    global_shape: tuple[int, ...]
    decay: bool  # weight decay applies: to matrices, not to norms and biases
    shards: tuple[
        Shard, ...
    ] = ()  # at most one for a dimension; none: every rank holds the whole tensor
    sums: tuple[
        str, ...
    ] = ()  # mesh groups whose ranks hold parts of the gradient, summed after `groups.grad`
    replicas: tuple[int, ...] = (0,)  # tp coordinates that hold this same slice
    owner: bool = True  # this rank counts it in norms and writes it to checkpoints
    groups: GradGroups = DENSE
    whole: bool = (
        False  # the optimizer needs the whole matrix: ZeRO gives it to one rank of `groups.shard`
    )
    narrow: bool = False  # the optimizer's state is narrower than its master weights

    def along(self, dim: int) -> tuple[int, int]:
        """This rank's [start, stop) of a dimension, without padding."""
        cut = next((shard for shard in self.shards if shard.dim == dim), None)
        return (cut.start, cut.stop) if cut is not None else (0, self.global_shape[dim])

    @property
    def local_shape(self) -> tuple[int, ...]:
        padded = {shard.dim: shard.padded for shard in self.shards}
        return tuple(padded.get(dim, size) for dim, size in enumerate(self.global_shape))

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """Position of the local tensor without padding in the global one."""
        return tuple(slice(*self.along(dim)) for dim in range(len(self.global_shape)))

    @property
    def numel(self) -> int:
        """Elements of the local tensor, padding included."""
        return prod(self.local_shape)

    def valid(self, local: Tensor) -> Tensor:
        """The local tensor without its padding (a view)."""
        for shard in self.shards:
            local = local.narrow(shard.dim, 0, shard.stop - shard.start)
        return local

    def take(self, full: Tensor) -> Tensor:
        """This rank's slice of a global tensor, as a new tensor with zeros for padding."""
        local = full.new_zeros(self.local_shape)
        self.valid(local).copy_(full[self.global_slices])
        return local


ParamTable = dict[str, ParamInfo]


def whole(name: str, shape: tuple[int, ...]) -> ParamInfo:
    """ParamInfo of a parameter that every rank holds whole."""
    return ParamInfo(name, tuple(shape), decay=len(shape) > 1)


def even_shard(dim: int, size: int, part: int, parts: int, axis: str = "tp") -> Shard:
    """Part number `part` of a dimension of `size` cut into `parts` of ceil(size / parts), the last
    ones padded."""
    padded = -(-size // parts)
    return Shard(dim, min(part * padded, size), min((part + 1) * padded, size), padded, axis)
