"""Whole matrices from ranks that hold parts of them: each is computed by one owner, whose result
goes back in parts.

ZeRO-3 cuts matrices into rows over the shard group, tensor parallelism into rows or columns over
tp. Ranks exchange as
many matrices at a time as there are ranks that hold parts, and each rank becomes the owner of one:
an all-to-all brings
it the parts, a second one takes the parts of its result back. So the work on whole matrices is
shared; in arXiv
2502.16982, section 2.3, every rank gathers and computes all of them.
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

#: Of a whole matrix, another of its shape.
MatrixFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cut:
    """A matrix of `shape` in parts along a dimension, one on each rank of a group."""

    group: ProcessGroup
    axis: str  # that the bytes are counted under
    shape: tuple[int, int]
    dim: int
    ranges: tuple[tuple[int, int], ...]  # [start, stop) of each rank

    def length(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def sent_length(self, rank: int) -> int:
        """Length of what a rank gives to the owner: nothing where the rank before it holds the
        same."""
        return 0 if rank and self.ranges[rank - 1] == self.ranges[rank] else self.length(rank)

    def numel(self, length: int) -> int:
        """Elements of a part."""
        return length * self.shape[1 - self.dim]

    def slice_of(self, matrix: Tensor, rank: int) -> Tensor:
        return matrix.narrow(self.dim, self.ranges[rank][0], self.length(rank))

    def unflatten(self, flat: Tensor, length: int) -> Tensor:
        """A part of this length from its elements."""
        return (
            flat.view(length, self.shape[1]) if self.dim == 0 else flat.view(self.shape[0], length)
        )


def cuts_of(info: ParamInfo, mesh: Mesh, rows: Sequence[tuple[int, int]] = ()) -> tuple[Cut, ...]:
    """How ranks hold a matrix, the outermost cut last. `rows`: of the local matrix, those of each
    rank of the shard group, where ZeRO cuts it."""
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
        held = tuple(
            (rank // copies * length, (rank // copies + 1) * length) for rank in range(tp.size())
        )
        cuts.append(Cut(tp, "tp", (info.global_shape[0], info.global_shape[1]), cut.dim, held))
    return tuple(cuts)


def rounds(cuts: Sequence[Sequence[Cut]]) -> Iterator[list[int]]:
    """Which of the matrices, by their cuts, ranks exchange at a time: some with the same groups,
    one for each of the ranks; large ones first, so that those of a round are alike."""
    by_groups = dict[tuple[str, ...], list[int]]()
    for at in sorted(range(len(cuts)), key=lambda at: -_work(cuts[at])):
        by_groups.setdefault(tuple(cut.axis for cut in cuts[at]), []).append(at)
    for indices in by_groups.values():
        size = prod(cut.group.size() for cut in cuts[indices[0]])
        yield from (indices[at : at + size] for at in range(0, len(indices), size))


def _work(cuts: Sequence[Cut]) -> int:
    """Of a whole matrix, to compare: multiplications by its own transpose."""
    return max(cuts[-1].shape) * min(cuts[-1].shape) ** 2 if cuts else 0


def map_whole_matrices(
    slices: Sequence[Tensor],
    cuts: Sequence[Sequence[Cut]],
    counter: CommCounter,
    function: MatrixFunction,
) -> list[Tensor]:
    """`of` each whole matrix: this rank's part of it. `parts`: this rank's, contiguous; `cuts`: of
    each, of the same groups. Collective over these."""
    if not slices or not cuts[0]:
        return [function(matrix) for matrix in slices]
    exchange = _Exchange([matrix_cuts[0] for matrix_cuts in cuts], counter)
    results = map_whole_matrices(
        exchange.to_owners(slices), [cuts[at][1:] for at in exchange.own], counter, function
    )
    return exchange.from_owners(results, example=slices[0])


class _Exchange:
    """Of matrices over one group; number i belongs to rank i modulo the ranks."""

    def __init__(self, cuts: Sequence[Cut], counter: CommCounter):
        self.cuts = cuts
        self.counter = counter
        self.group = cuts[0].group
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.owned = [range(rank, len(cuts), self.ranks) for rank in range(self.ranks)]
        self.own = self.owned[self.rank]

    def _send(
        self, pieces: list[list[Tensor]], arriving: list[list[int]], example: Tensor
    ) -> list[list[Tensor]]:
        """`pieces`: to each rank; `arriving`: elements of each piece from each rank. What arrives,
        flat."""
        messages = [
            torch.cat([example.new_empty(0), *(piece.reshape(-1) for piece in rank_pieces)])
            for rank_pieces in pieces
        ]
        sent_sizes = [message.numel() for message in messages]
        received_sizes = [sum(sizes) for sizes in arriving]
        axis = self.cuts[0].axis
        arrived = start_all_to_all_uneven(
            torch.cat(messages), sent_sizes, received_sizes, self.group, axis, self.counter
        )()
        received = arrived.split(received_sizes)
        return [
            list(message_in.split(sizes)) if sizes else []
            for message_in, sizes in zip(received, arriving, strict=True)
        ]

    def to_owners(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts -> its own matrices whole."""
        sent = [
            [slices[at] for at in owned if self.cuts[at].sent_length(self.rank)]
            for owned in self.owned
        ]
        lengths = [
            [self.cuts[at].sent_length(rank) for at in self.own] for rank in range(self.ranks)
        ]
        sizes = [
            [self.cuts[at].numel(n) for at, n in zip(self.own, row, strict=True)] for row in lengths
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
        """Its own matrices whole -> this rank's parts of all."""
        own_matrices = [(one, self.cuts[at]) for one, at in zip(matrices, self.own, strict=True)]
        sent = [
            [cut.slice_of(one, rank) for one, cut in own_matrices] for rank in range(self.ranks)
        ]
        sizes = [
            [self.cuts[at].numel(self.cuts[at].length(self.rank)) for at in owned]
            for owned in self.owned
        ]
        slices = dict[int, Tensor]()
        for owned, flat in zip(self.owned, self._send(sent, sizes, example), strict=True):
            for at, one in zip(owned, flat, strict=True):
                slices[at] = self.cuts[at].unflatten(one, self.cuts[at].length(self.rank))
        return [slices[at] for at in range(len(self.cuts))]
