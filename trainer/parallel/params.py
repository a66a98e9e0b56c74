"""The registry of one rank's parameter slices, read by gradients, optimizer, norms and checkpoints.

A parameter has the same global name (`layers.17.attn.wq.weight`) and global shape on every layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

#: A kind of stored state of a parameter: "master", its weights in the optimizer's precision, and
#: the state of the optimizer's rule ("exp_avg" and "exp_avg_sq", or "momentum"). "state" is the
#: state without gradient of modules, under names of its own.
StateKind = str
#: The kind of weights that lack the latest update, of a run with delayed updates. Checkpoints of
#: other runs do not contain them.
STALE = "stale"


@dataclass(frozen=True)
class Shard:
    """One dimension of a parameter that is cut over the ranks of a mesh axis. Indices count
    elements of the dimension."""

    dim: int
    start: int  # this rank holds [start, stop) without padding; empty if it holds only padding
    stop: int
    padded: int  # local size, including padding at its end
    axis: str = "tp"


@dataclass(frozen=True)
class GradGroups:
    """A class of parameters: the mesh groups of its gradients. Experts are a class of their own, of
    which the ranks of one dense group hold different ones."""

    name: str
    #: Ranks that hold the same parameters and see other tokens: gradients are summed over it.
    grad: str
    #: Ranks of `grad` that together hold one copy of what ZeRO shards.
    shard: str
    #: Ranks of `grad` with the same shard (hybrid sharding).
    replica: str
    #: Ranks that together hold every parameter of the class once: the squares of the norm are
    #: summed over it.
    model: str


DENSE = GradGroups(
    "dense",
    grad="grad",
    shard="shard",
    replica="replica",
    model="model",
)
EXPERT = GradGroups(
    "expert",
    grad="expert_grad",
    shard="expert_shard",
    replica="expert_replica",
    model="expert_model",
)


def classes_of(spread: int) -> tuple[GradGroups, ...]:
    """Returns the classes of a plan's parameters. `spread`: the ranks of a dense group that hold
    different experts; if there is only one, experts are dense parameters."""
    return (DENSE, EXPERT) if spread > 1 else (DENSE,)


@dataclass(frozen=True)
class ParamInfo:
    """One parameter as one rank sees it."""

    name: str
    global_shape: tuple[int, ...]
    decay: bool  # whether weight decay applies: to matrices, not to norms and biases
    #: At most one shard per dimension; none if every rank holds the whole tensor.
    shards: tuple[Shard, ...] = ()
    #: Mesh groups whose ranks hold parts of the gradient, summed after `groups.grad`.
    sums: tuple[str, ...] = ()
    replicas: tuple[int, ...] = (0,)  # tp coordinates that hold this same slice
    owner: bool = True  # whether this rank counts it in norms and writes it to checkpoints
    groups: GradGroups = DENSE
    #: Whether the optimizer needs the whole matrix: ZeRO gives it to one rank of `groups.shard`.
    whole_matrix: bool = False
    narrow: bool = False  # whether the optimizer's state is narrower than its master weights

    def along(self, dim: int) -> tuple[int, int]:
        """Returns this rank's [start, stop) of a dimension, without padding."""
        for shard in self.shards:
            if shard.dim == dim:
                return shard.start, shard.stop
        return 0, self.global_shape[dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        padded = {shard.dim: shard.padded for shard in self.shards}
        return tuple(padded.get(dim, size) for dim, size in enumerate(self.global_shape))

    @property
    def global_slices(self) -> tuple[slice, ...]:
        """The position of the local tensor, without padding, in the global one."""
        return tuple(slice(*self.along(dim)) for dim in range(len(self.global_shape)))

    @property
    def numel(self) -> int:
        """The number of elements of the local tensor, including padding."""
        return prod(self.local_shape)

    def valid(self, local: Tensor) -> Tensor:
        """Returns a view of the local tensor without its padding."""
        for shard in self.shards:
            local = local.narrow(shard.dim, 0, shard.stop - shard.start)
        return local

    def take(self, full: Tensor) -> Tensor:
        """Returns this rank's slice of a global tensor as a new tensor, with zeros for padding."""
        local = full.new_zeros(self.local_shape)
        self.valid(local).copy_(full[self.global_slices])
        return local


ParamTable = dict[str, ParamInfo]


def whole(name: str, shape: tuple[int, ...]) -> ParamInfo:
    """Returns the ParamInfo of a parameter that every rank holds whole."""
    return ParamInfo(name, tuple(shape), decay=len(shape) > 1)


def even_shard(
    dim: int,
    size: int,
    index: int,
    count: int,
    axis: str = "tp",
) -> Shard:
    """Returns shard `index` of a dimension of `size` that is cut into `count` shards of ceil(size /
    count), of which the last ones are padded."""
    padded = -(-size // count)
    start = min(index * padded, size)
    stop = min((index + 1) * padded, size)
    return Shard(dim, start, stop, padded, axis)
