"""The overlap of two slices of one parameter: pure arithmetic, no tensors.

A slice is a flat range of a block of the parameter; the block cuts some of its dimensions
(`format.Slice`, `format.StatePiece`). Neighbouring dimensions that neither of two slices cuts are
merged into one. A flat range of a block of n dimensions consists of at most 2n - 1 boxes: the rest
of its first row, whole rows, the beginning of its last row, and the same again inside the two
partial rows. Two slices overlap where their boxes do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

#: (dimension, start, stop): one dimension of a block
Cut = tuple[int, int, int]
#: half-open, for each dimension
Box = tuple[tuple[int, int], ...]


class BlockRange(NamedTuple):
    """The elements `[offset, offset + length)` of the flattened block to which `cuts` reduce the
    parameter."""

    cuts: tuple[Cut, ...]
    offset: int
    length: int


class Overlap(NamedTuple):
    """A rectangle of elements that two ranges share. Its element (row, column) is element number
    `left_offset + row * left_step + column` of the left range and `right_offset + row * right_step
    + column` of the right one."""

    rows: int
    columns: int
    left_offset: int
    left_step: int
    right_offset: int
    right_step: int


def overlaps(
    left_range: BlockRange,
    right_range: BlockRange,
    shape: Sequence[int],
) -> list[Overlap]:
    """Returns the rectangles that two ranges of a parameter of `shape` share, in element order."""
    cut_dims = {dim for block_range in (left_range, right_range) for dim, _, _ in block_range.cuts}
    left_block = _merged(left_range.cuts, shape, cut_dims)
    right_block = _merged(right_range.cuts, shape, cut_dims)
    rectangles = []
    for box in _boxes(left_block, left_range.offset, left_range.offset + left_range.length):
        for other_box in _boxes(
            right_block,
            right_range.offset,
            right_range.offset + right_range.length,
        ):
            shared = _intersection(box, other_box)
            if shared is None:
                continue
            (top, bottom), (column, last_column) = shared[-2:]
            for leading in itertools.product(*(range(*span) for span in shared[:-2])):
                first = (*leading, top, column)
                rectangle = Overlap(
                    rows=bottom - top,
                    columns=last_column - column,
                    left_offset=_number(left_block, first) - left_range.offset,
                    left_step=_row_length(left_block),
                    right_offset=_number(right_block, first) - right_range.offset,
                    right_step=_row_length(right_block),
                )
                rectangles.append(rectangle)
    return rectangles


def _intersection(box: Box, second_box: Box) -> Box | None:
    """Returns the box that two boxes share, or None."""
    spans = []
    for (start, stop), (other_start, other_stop) in zip(box, second_box, strict=True):
        spans.append((max(start, other_start), min(stop, other_stop)))
    empty = any(start >= stop for start, stop in spans)
    return None if empty else tuple(spans)


def _row_length(block: Box) -> int:
    start, stop = block[-1]
    return stop - start


def _merged(cuts: Sequence[Cut], shape: Sequence[int], dims: set[int]) -> Box:
    """Returns the block to which `cuts` reduce the parameter, with every dimension that is not in
    `dims` merged into the one before it; the block has two dimensions at least."""
    span_of = {dim: (start, stop) for dim, start, stop in cuts}
    block = list[tuple[int, int]]()
    for dim, size in enumerate(shape):
        if block and dim not in dims:
            low, high = block[-1]
            block[-1] = low * size, high * size
        else:
            block.append(span_of.get(dim, (0, size)))
    return (*((0, 1),) * (2 - len(block)), *block)


def _boxes(block: Box, first: int, stop: int) -> Iterator[Box]:
    """Yields the elements number `first` to `stop` of a flattened block as boxes of the parameter,
    in order."""
    if first >= stop:
        return
    low = block[0][0]
    rest = block[1:]
    if not rest:
        yield ((low + first, low + stop),)
        return
    row_size = prod(end - begin for begin, end in rest)
    top, top_rest = divmod(first, row_size)
    bottom, bottom_rest = divmod(stop, row_size)

    def row_boxes(row: int, begin: int, end: int) -> Iterator[Box]:
        for box in _boxes(rest, begin, end):
            yield ((low + row, low + row + 1), *box)

    if top == bottom:
        yield from row_boxes(top, top_rest, bottom_rest)
        return
    if top_rest:
        yield from row_boxes(top, top_rest, row_size)
        top += 1
    if top < bottom:
        yield ((low + top, low + bottom), *rest)
    yield from row_boxes(bottom, 0, bottom_rest)


def _number(block: Box, coordinates: Sequence[int]) -> int:
    """Returns the number of an element of the parameter in the flattened block."""
    number = 0
    for (low, high), coordinate in zip(block, coordinates, strict=True):
        number = number * (high - low) + coordinate - low
    return number


def tiling_problem(ranges: Sequence[BlockRange], shape: Sequence[int]) -> str | None:
    """Names the first gap or overlap of ranges that should hold every element of a parameter of
    `shape` exactly once. Returns None if they do.

    It expects the cuts that layouts make: each dimension in consecutive runs, one block per
    combination of runs, and each block in consecutive ranges.
    """
    if not ranges:
        return "nobody holds it"
    blocks: dict[Box, list[BlockRange]] = {}
    for block_range in ranges:
        span_of = {dim: (start, stop) for dim, start, stop in block_range.cuts}
        block_key = tuple(span_of.get(dim, (0, size)) for dim, size in enumerate(shape))
        blocks.setdefault(block_key, []).append(block_range)
    runs = [sorted({block[dim] for block in blocks}) for dim in range(len(shape))]
    for dim, spans in enumerate(runs):
        if problem := _run_problem(spans, shape[dim], f"of dimension {dim}"):
            return problem
    for key in itertools.product(*runs):
        spans = sorted((held.offset, held.offset + held.length) for held in blocks.get(key, ()))
        block = ", ".join(f"{low}:{high}" for low, high in key) if len(blocks) > 1 else ""
        size = prod(high - low for low, high in key)
        if problem := _run_problem(spans, size, f"of its block {block}" if block else ""):
            return problem
    return None


def _run_problem(spans: Sequence[tuple[int, int]], size: int, where: str) -> str | None:
    """Names the first gap or overlap of sorted half-open spans that should cover 0 to `size`.
    Returns None if they do."""
    position = 0
    for start, stop in [*spans, (size, size)]:
        if start != position:
            complaint = "nobody holds" if start > position else "more than one hold"
            return f"{complaint} {min(position, start)} to {max(position, start)} {where}".rstrip()
        position = stop
    return None
