"""Packed documents of a micro-batch, and attention that keeps them apart without a mask.

Where documents begin is known on the host, where batches are made, so no length is ever read from a
device. Attention of packed documents is that of pairs of runs, queries of one document and its
keys, laid end to end (variable-length attention: FlashAttention, arXiv 2205.14135): work and memory
follow the documents, not the square of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trainer.compat import Segments

#: Ascending ranges of positions in the whole sequence: what a block of attention has of each
#: sample, end to end.
Ranges = tuple[range, ...]


@dataclass(frozen=True)
class Documents:
    """`numbers`: int64 [b, s], of the document that a token belongs to, ascending; under context
    parallelism those of a rank's tokens. `lengths`: of each document of each sample, over the whole
    sequence, on the host."""

    numbers: Tensor
    lengths: tuple[tuple[int, ...], ...]
    _segments: dict[tuple[Ranges, Ranges], Segments] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, numbers: Tensor) -> Documents:
        """From `numbers` on the host."""
        return cls(
            numbers,
            tuple(tuple(row.unique_consecutive(return_counts=True)[1].tolist()) for row in numbers),
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Documents:
        """The same documents with `change` applied to the tokens' numbers."""
        return Documents(change(self.numbers), self.lengths)

    def whole(self) -> Segments:
        """Every sample, its queries and its keys."""
        everything = (range(sum(self.lengths[0])),)
        return self.segments(everything, everything)

    def segments(self, queries: Ranges, keys: Ranges) -> Segments:
        """Runs of the tokens at `queries` of all samples, and of those at `keys`, that are of one
        document: on the device of `numbers`, made once."""
        if (queries, keys) not in self._segments:
            runs = tuple(pairs(self.lengths, queries, keys))
            self._segments[queries, keys] = Segments.of(runs, self.numbers.device)
        return self._segments[queries, keys]


def pairs(lengths: Sequence[Sequence[int]], queries: Ranges, keys: Ranges) -> list[tuple[int, int]]:
    """(queries, keys) of each document in turn; neighbours that have none of the one are joined."""
    runs = list[tuple[int, int]]()
    for sample in lengths:
        start = 0
        for length in sample:
            run = _within(queries, start, start + length), _within(keys, start, start + length)
            start += length
            last = runs[-1] if runs else (0, 0)
            if any(one == before == 0 for one, before in zip(run, last, strict=True)):
                runs[len(runs) - 1 :] = [(last[0] + run[0], last[1] + run[1])]
            elif any(run):
                runs.append(run)
    return [one for one in runs if any(one)]


def _within(ranges: Ranges, start: int, stop: int) -> int:
    return sum(
        max(0, min(positions.stop, stop) - max(positions.start, start)) for positions in ranges
    )
