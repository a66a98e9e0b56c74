"""Computations on whole matrices of which ranks hold parts: one owner computes each matrix, and
sends the parts of the result back.

ZeRO-3 cuts matrices into rows over the shard group, tensor parallelism into rows or columns over
tp. The ranks that hold parts exchange as many matrices at a time as there are ranks, and each rank
owns one of them: an all-to-all brings the owner the parts, a second one returns the parts of its
result. So the ranks share the work on whole matrices; in arXiv 2502.16982, section 2.3, every rank
gathers and computes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.comm.uneven import start_all_to_all_uneven
from trainer.parallel.params import ParamInfo

#: A whole matrix -> another of its shape.
MatrixFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cut:
    """A matrix of `shape` in parts along a dimension, one on each rank of a group."""

    group: ProcessGroup
    axis: str  # the axis under which the bytes are counted
    shape: tuple[int, int]
    dim: int
    ranges: tuple[tuple[int, int], ...]  # [start, stop) of each rank

    def length(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def sent_length(self, rank: int) -> int:
        """The length of the part that a rank sends to the owner: 0 if the previous rank holds the
        same part."""
        if rank and self.ranges[rank - 1] == self.ranges[rank]:
            return 0
        return self.length(rank)

    def numel(self, length: int) -> int:
        """The number of elements of a part."""
        return length * self.shape[1 - self.dim]

    def slice_of(self, matrix: Tensor, rank: int) -> Tensor:
        return matrix.narrow(self.dim, self.ranges[rank][0], self.length(rank))

    def unflatten(self, flat: Tensor, length: int) -> Tensor:
        """Returns the part of this length whose elements are `flat`."""
        if self.dim == 0:
            return flat.view(length, self.shape[1])
        return flat.view(self.shape[0], length)


def cuts_of(
    info: ParamInfo,
    mesh: Mesh,
    rows: Sequence[tuple[int, int]] = (),
) -> tuple[Cut, ...]:
    """Returns the cuts of a matrix, the outermost last. `rows`: the rows of the local matrix that
    each rank of the shard group holds, if ZeRO cuts the matrix."""
    cuts = list[Cut]()
    sharded = mesh.group(info.groups.shard)
    if rows and sharded is not None:
        height, width = info.local_shape
        cuts.append(Cut(sharded, "dp", (height, width), 0, tuple(rows)))
    tp = mesh.group("tp")
    if info.shards and tp is not None:
        (cut,) = info.shards
        size = info.global_shape[cut.dim]
        copies = len(info.replicas)
        length = size * copies // tp.size()
        shard_of_rank = (rank // copies for rank in range(tp.size()))
        ranges = tuple((shard * length, (shard + 1) * length) for shard in shard_of_rank)
        height, width = info.global_shape
        cuts.append(Cut(tp, "tp", (height, width), cut.dim, ranges))
    return tuple(cuts)


def rounds(cuts: Sequence[Sequence[Cut]]) -> Iterator[list[int]]:
    """Yields the indices of the matrices that ranks exchange at a time: matrices with the same
    groups, one per rank. Large matrices come first, so that those of a round are of similar
    size."""
    by_groups = dict[tuple[str, ...], list[int]]()
    for at in sorted(range(len(cuts)), key=lambda at: -_work(cuts[at])):
        by_groups.setdefault(tuple(cut.axis for cut in cuts[at]), []).append(at)
    for indices in by_groups.values():
        size = prod(cut.group.size() for cut in cuts[indices[0]])
        yield from (indices[at : at + size] for at in range(0, len(indices), size))


def _work(cuts: Sequence[Cut]) -> int:
    """The work on a whole matrix, for comparison: multiplications by its own transpose."""
    return max(cuts[-1].shape) * min(cuts[-1].shape) ** 2 if cuts else 0


def map_whole_matrices(
    slices: Sequence[Tensor],
    cuts: Sequence[Sequence[Cut]],
    counter: CommCounter,
    function: MatrixFunction,
) -> list[Tensor]:
    """Applies `function` to whole matrices. Returns this rank's parts of the results.

    `slices`: this rank's contiguous parts; `cuts`: the cuts of each matrix, all over the same
    groups. Collective over these groups.
    """
    if not slices or not cuts[0]:
        return [function(matrix) for matrix in slices]
    exchange = _Exchange([matrix_cuts[0] for matrix_cuts in cuts], counter)
    owned = exchange.to_owners(slices)
    inner_cuts = [cuts[at][1:] for at in exchange.own]
    results = map_whole_matrices(owned, inner_cuts, counter, function)
    return exchange.from_owners(results, example=slices[0])


class _Exchange:
    """The exchange of matrices over one group; rank i modulo the ranks owns matrix i."""

    def __init__(self, cuts: Sequence[Cut], counter: CommCounter):
        self.cuts = cuts
        self.counter = counter
        self.group = cuts[0].group
        self.ranks = self.group.size()
        self.rank = self.group.rank()
        self.owned = [range(rank, len(cuts), self.ranks) for rank in range(self.ranks)]
        self.own = self.owned[self.rank]

    def _send(
        self,
        pieces: list[list[Tensor]],
        arriving: list[list[int]],
        example: Tensor,
    ) -> list[list[Tensor]]:
        """Sends `pieces[i]` to rank i. `arriving[i]`: the elements of each piece from rank i.
        Returns the pieces that arrive from each rank, flat."""
        messages = [
            torch.cat([example.new_empty(0), *(piece.reshape(-1) for piece in rank_pieces)])
            for rank_pieces in pieces
        ]
        sent_sizes = [message.numel() for message in messages]
        received_sizes = [sum(sizes) for sizes in arriving]
        axis = self.cuts[0].axis
        arrived = start_all_to_all_uneven(
            torch.cat(messages),
            sent_sizes,
            received_sizes,
            self.group,
            axis=axis,
            counter=self.counter,
        )()
        received = arrived.split(received_sizes)
        return [
            list(message.split(sizes)) if sizes else []
            for message, sizes in zip(received, arriving, strict=True)
        ]

    def to_owners(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts -> the whole matrices that it owns."""
        sent = [
            [slices[at] for at in owned if self.cuts[at].sent_length(self.rank)]
            for owned in self.owned
        ]
        lengths = [
            [self.cuts[at].sent_length(rank) for at in self.own] for rank in range(self.ranks)
        ]
        sizes = [
            [self.cuts[at].numel(length) for at, length in zip(self.own, rank_lengths, strict=True)]
            for rank_lengths in lengths
        ]
        received = self._send(sent, sizes, slices[0])
        matrices = list[Tensor]()
        for number, at in enumerate(self.own):
            cut = self.cuts[at]
            ranks = range(self.ranks)
            pieces = [
                cut.unflatten(received[rank][number], lengths[rank][number]) for rank in ranks
            ]
            matrices.append(torch.cat(pieces, cut.dim))
        return matrices

    def from_owners(self, matrices: Sequence[Tensor], example: Tensor) -> list[Tensor]:
        """The whole matrices that this rank owns -> its parts of all matrices."""
        own_cuts = [self.cuts[at] for at in self.own]
        sent = [
            [cut.slice_of(matrix, rank) for matrix, cut in zip(matrices, own_cuts, strict=True)]
            for rank in range(self.ranks)
        ]
        sizes = [
            [self.cuts[at].numel(self.cuts[at].length(self.rank)) for at in owned]
            for owned in self.owned
        ]
        slices = dict[int, Tensor]()
        for owned, flat in zip(self.owned, self._send(sent, sizes, example), strict=True):
            for at, elements in zip(owned, flat, strict=True):
                cut = self.cuts[at]
                slices[at] = cut.unflatten(elements, cut.length(self.rank))
        return [slices[at] for at in range(len(self.cuts))]
