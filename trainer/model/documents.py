"""Packed documents of a micro-batch, and attention that keeps them apart without a mask.

The host knows where documents begin, since it makes the batches, so no length is ever read from a
device. Attention of packed documents is that of pairs of runs, the queries of one document and its
keys, laid end to end (variable-length attention: FlashAttention, arXiv 2205.14135): work and memory
grow with the documents, not with the square of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from trainer.compat import Segments

#: Ascending ranges of positions in the whole sequence: those of each sample that a block of
#: attention holds, end to end.
Ranges = tuple[range, ...]


@dataclass(eq=False)
class Documents:
    """The documents of a micro-batch. Nothing changes them; they are not frozen, since torch 2.11
    guards all fields of a frozen dataclass that passes through compiled code, and would compile
    blocks anew for each number of documents until it gave up.

    `numbers`: int64 [b, s], the number of each token's document, ascending; under context
    parallelism those of a rank's tokens. `lengths`: the length of each document of each sample,
    over the whole sequence, on the host.
    """

    numbers: Tensor
    lengths: tuple[tuple[int, ...], ...]
    _segments: dict[tuple[Ranges, Ranges], Segments] = field(
        default_factory=dict,
        repr=False,
        compare=False,
    )

    @classmethod
    def of(cls, numbers: Tensor) -> Documents:
        """Counts the lengths of documents, given `numbers` on the host."""
        counts = [row.unique_consecutive(return_counts=True)[1] for row in numbers]
        return cls(numbers, tuple(tuple(row.tolist()) for row in counts))

    def each(self, change: Callable[[Tensor], Tensor]) -> Documents:
        """Returns the same documents with `change` applied to the tokens' numbers."""
        return Documents(change(self.numbers), self.lengths)

    def whole(self) -> Segments:
        """Returns the runs of whole samples."""
        everything = (range(sum(self.lengths[0])),)
        return self.segments(everything, everything)

    def segments(self, queries: Ranges, keys: Ranges) -> Segments:
        """Returns the pairs of runs of one document at `queries` and at `keys` of all samples, on
        the device of `numbers`. Each is made once."""
        if (queries, keys) not in self._segments:
            runs = tuple(pairs(self.lengths, queries, keys))
            self._segments[queries, keys] = Segments.of(runs, self.numbers.device)
        return self._segments[queries, keys]


def pairs(
    lengths: Sequence[Sequence[int]],
    queries: Ranges,
    keys: Ranges,
) -> list[tuple[int, int]]:
    """Returns the lengths (queries, keys) of each document in turn; neighbouring documents that
    both have no queries, or no keys, are joined."""
    runs = list[tuple[int, int]]()
    for sample in lengths:
        start = 0
        for length in sample:
            stop = start + length
            run = (_within(queries, start, stop), _within(keys, start, stop))
            start = stop
            last = runs[-1] if runs else (0, 0)
            if run[0] == last[0] == 0 or run[1] == last[1] == 0:
                runs[len(runs) - 1 :] = [(last[0] + run[0], last[1] + run[1])]
            elif any(run):
                runs.append(run)
    return [run for run in runs if any(run)]


def _within(ranges: Ranges, start: int, stop: int) -> int:
    """The number of positions of `ranges` in [start, stop)."""
    return sum(
        max(0, min(positions.stop, stop) - max(positions.start, start)) for positions in ranges
    )
