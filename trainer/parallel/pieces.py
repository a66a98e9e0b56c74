"""The tokens of a micro-batch in pieces: one piece travels while another is multiplied.

Of a sequence that its group has whole, a rank holds a shard. A piece is the same rows of every
rank's shard; of a micro-batch with as many samples as pieces or more, it is whole samples. The
order of tokens in memory stays that of the sequence: a piece of it is a view with strides,
and products read and write such views.

    shard    [b, s/ranks, w]   [groups, samples,        slices, rows, w]
    sequence [b, s, w]         [groups, samples, ranks, slices, rows, w]
    a piece of a shard         [samples * rows, w], contiguous
    a piece of a sequence      [ranks, samples, rows, w]
    joined pieces              [groups, slices, ranks, samples, rows, w], as collectives join shards
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from orchestrator.plan.batch import largest_cut
from trainer.comm.collectives import CommCounter, Handle, start_all_gather

from .tensor import AXIS


@dataclass(frozen=True)
class Pieces:
    """A cut of [b, s, w]."""

    groups: int  # of samples
    samples: int  # of a group; more than one only if `slices` is 1
    ranks: int
    slices: int  # of a rank's rows of each sample
    rows: int  # of a part

    @classmethod
    def of(cls, batch: int, length: int, ranks: int, limit: int) -> Pieces:
        """The cut of `batch` shards of `length` rows into the most equal pieces, up to `limit`."""
        count = largest_cut(batch, length, limit)
        groups = min(batch, count)
        slices = count // groups
        return cls(groups, batch // groups, ranks, slices, length // slices)

    @property
    def count(self) -> int:
        return self.groups * self.slices

    @property
    def tokens(self) -> int:
        """The tokens of a piece, of all ranks."""
        return self.ranks * self.samples * self.rows

    def of_shard(self, shard: Tensor) -> Sequence[Tensor]:
        """[b, s/ranks, w], contiguous -> its pieces."""
        return shard.view(self.count, self.samples * self.rows, -1).unbind()

    def of_sequence(self, sequence: Tensor) -> list[Tensor]:
        """[b, s, w], contiguous -> its pieces."""
        by_group = sequence.view(*self._shape, -1)
        return [
            samples.select(2, index).transpose(0, 1)
            for samples in by_group.unbind()
            for index in range(self.slices)
        ]

    def join(self, sequence: Tensor) -> Tensor:
        """[b, s, w] -> [b * s, w] in the order of joined pieces."""
        by_piece = sequence.view(*self._shape, -1).transpose(1, 3)
        return by_piece.reshape(self.count * self.tokens, -1)

    def in_sequence(self, joined: Tensor) -> Tensor:
        """Joined pieces [b * s, w] -> [b, s, w]."""
        groups, samples, ranks, slices, rows = self._shape
        by_piece = joined.view((groups, slices, ranks, samples, rows, joined.shape[-1]))
        sequence = by_piece.transpose(1, 3)
        return sequence.reshape(groups * samples, -1, joined.shape[-1])

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.groups, self.samples, self.ranks, self.slices, self.rows


def gather_ahead(
    shard: Tensor,
    joined: Tensor,
    pieces: Pieces,
    group: dist.ProcessGroup,
    counter: CommCounter,
) -> Iterator[Tensor]:
    """Yields the pieces of a sequence [ranks, samples, rows, w] in order, each when it has arrived
    in `joined` [b * s, w] and the next one is on its way.

    No more than that one is under way: on a device with one hardware queue, a gather that waits for
    the previous gather would hold up the products behind it.
    """
    slots = joined.view(pieces.count, pieces.tokens, -1)
    sources = pieces.of_shard(shard)

    def start(index: int) -> Handle:
        return start_all_gather(sources[index], group, AXIS, counter, slots[index])

    arriving = start(0)
    for index in range(pieces.count):
        needed = arriving
        if index + 1 < pieces.count:
            arriving = start(index + 1)
        piece = needed.wait()
        yield piece.view(pieces.ranks, pieces.samples, pieces.rows, -1)
