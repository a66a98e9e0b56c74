"""Overlap of two slices of one parameter: pure arithmetic, no tensors.

A slice is a flat range of a block `start..stop` of one dimension (`format.Slice`, `format.StatePiece`). View the
parameter as a matrix whose rows are all dimensions before that one: the block is a range of columns, and a flat range
of the block is at most three rectangles (the rest of its first row, whole rows, the beginning of its last row). Two
slices overlap where their rectangles do. A range of a block of dimension 0, or of the whole parameter, is a run of
elements: it becomes rectangles in whichever matrix the other slice needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class BlockRange(NamedTuple):
    """Elements `[offset, offset + length)` of the flattened block `start..stop` of dimension `dim` (None: of all)."""

    dim: int | None
    start: int
    stop: int
    offset: int
    length: int


class Overlap(NamedTuple):
    """A rectangle of elements that two ranges share. Its element (row, column) is number
    `left + row * left_step + column` of the left one and `right + row * right_step + column` of the right one."""

    rows: int
    columns: int
    left: int
    left_step: int
    right: int
    right_step: int


class _Rows(NamedTuple):
    """A block range as the flat range `[first, first + length)` of `width` columns, from `column` on, of a matrix."""

    width: int
    column: int
    first: int
    length: int

    def rectangles(self) -> list[tuple[int, int, int, int]]:
        """(row from, row to, column from, column to), in order; at most three."""
        (top, x), (bottom, y) = divmod(self.first, self.width), divmod(self.first + self.length, self.width)
        if top == bottom:
            cuts = [(top, top + 1, x, y)]
        else:
            cuts = [(top, top + 1, x, self.width)] if x else []
            cuts += [(top + bool(x), bottom, 0, self.width), (bottom, bottom + 1, 0, y)]
        return [(a, b, c + self.column, d + self.column) for a, b, c, d in cuts if a < b and c < d]

    def number_of(self, row: int, column: int) -> int:
        return row * self.width + column - self.column - self.first


def overlaps(left: BlockRange, right: BlockRange, shape: Sequence[int]) -> list[Overlap]:
    """The rectangles that two ranges of one parameter of `shape` share, in element order.

    Raises ValueError if they cut it along two different dimensions behind the first, which no layout does.
    """
    inner = {part.dim for part in (left, right) if part.dim}
    if len(inner) > 1:
        raise ValueError(f"slices along dimensions {left.dim} and {right.dim} of one parameter")
    pitch = prod(shape[min(inner, default=0) :])
    one, other = _rows(left, shape, pitch), _rows(right, shape, pitch)
    found = []
    for top, bottom, x, y in one.rectangles():
        for other_top, other_bottom, other_x, other_y in other.rectangles():
            row, rows = max(top, other_top), min(bottom, other_bottom) - max(top, other_top)
            column, columns = max(x, other_x), min(y, other_y) - max(x, other_x)
            if rows > 0 and columns > 0:
                places = one.number_of(row, column), one.width, other.number_of(row, column), other.width
                found.append(Overlap(rows, columns, *places))
    return found


def _rows(part: BlockRange, shape: Sequence[int], pitch: int) -> _Rows:
    if part.dim:
        unit = prod(shape[part.dim + 1 :])
        return _Rows((part.stop - part.start) * unit, part.start * unit, part.offset, part.length)
    before = part.start * prod(shape[1:]) if part.dim == 0 else 0
    return _Rows(pitch, 0, before + part.offset, part.length)


def tiling_problem(parts: Sequence[BlockRange], shape: Sequence[int]) -> str | None:
    """None if the ranges hold every element of a parameter of `shape` exactly once, else what is wrong.

    Expects the cuts that layouts make: consecutive blocks of one dimension, each cut into consecutive ranges.
    """
    blocks: dict[tuple[int | None, int, int], list[BlockRange]] = {}
    for part in parts:
        blocks.setdefault((part.dim, part.start, part.stop), []).append(part)
    if len({dim for dim, _, _ in blocks}) != 1:
        return "it is cut along several dimensions" if blocks else "nobody holds it"
    (dim,) = {dim for dim, _, _ in blocks}
    size, around = (shape[dim], prod(shape) // max(shape[dim], 1)) if dim is not None else (1, prod(shape))
    spans = [(start, stop) if dim is not None else (0, 1) for _, start, stop in blocks]
    if problem := _run_problem(sorted(spans), size, f"of dimension {dim}"):
        return problem
    for (_, start, stop), ranges in blocks.items():
        wanted = (stop - start) * around if dim is not None else around
        spans = sorted((part.offset, part.offset + part.length) for part in ranges)
        if problem := _run_problem(spans, wanted, f"of its block {start}:{stop}" if dim is not None else ""):
            return problem
    return None


def _run_problem(spans: Sequence[tuple[int, int]], size: int, where: str) -> str | None:
    """None if the half-open spans, sorted, cover 0 to `size` without gap or overlap, else the first problem."""
    at = 0
    for start, stop in [*spans, (size, size)]:
        if start != at:
            word = "nobody holds" if start > at else "more than one hold"
            return f"{word} {min(at, start)} to {max(at, start)} {where}".rstrip()
        at = stop
    return None
