"""Overlap of two slices of one parameter: pure arithmetic, no tensors.

A slice is a flat range of a block, which some dimensions of the parameter are cut to
(`format.Slice`, `format.StatePiece`). Neighbouring dimensions that neither of two slices cuts are
one dimension. A flat range of a block of n dimensions is at most 2n - 1 boxes: the rest of its
first row, whole rows, the beginning of its last row, and the same again inside of the two rests.
Two slices overlap where their boxes do.
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
    """Elements `[offset, offset + length)` of the flattened block that `cuts` leave of the
    parameter."""

    cuts: tuple[Cut, ...]
    offset: int
    length: int


class Overlap(NamedTuple):
    """A rectangle of elements that two ranges share. Its element (row, column) is number `left +
    row * left_step + column` of the left one and `right + row * right_step + column` of the right
    one."""

    rows: int
    columns: int
    left: int
    left_step: int
    right: int
    right_step: int


def overlaps(left: BlockRange, right: BlockRange, shape: Sequence[int]) -> list[Overlap]:
    """The rectangles that two ranges of one parameter of `shape` share, in element order."""
    cut = {dim for part in (left, right) for dim, _, _ in part.cuts}
    one = _merged(left.cuts, shape, cut)
    other = _merged(right.cuts, shape, cut)
    found = []
    for box in _boxes(one, left.offset, left.offset + left.length):
        for other_box in _boxes(other, right.offset, right.offset + right.length):
            shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other_box, strict=True)]
            if any(low >= high for low, high in shared):
                continue
            (top, bottom), (x, y) = shared[-2:]
            for before in itertools.product(*(range(*span) for span in shared[:-2])):
                first = (*before, top, x)
                places = [
                    (_number(block, first) - part.offset, block[-1][1] - block[-1][0])
                    for block, part in ((one, left), (other, right))
                ]
                found.append(Overlap(bottom - top, y - x, *places[0], *places[1]))
    return found


def _merged(cuts: Sequence[Cut], shape: Sequence[int], dims: set[int]) -> Box:
    """The block that `cuts` leave, with every dimension not in `dims` joined to the one before; two
    at least."""
    of = {dim: (start, stop) for dim, start, stop in cuts}
    block = list[tuple[int, int]]()
    for dim, size in enumerate(shape):
        if block and dim not in dims:
            low, high = block[-1]
            block[-1] = low * size, high * size
        else:
            block.append(of.get(dim, (0, size)))
    return (*((0, 1),) * (2 - len(block)), *block)


def _boxes(block: Box, first: int, stop: int) -> Iterator[Box]:
    """The elements number `first` to `stop` of a flattened block as boxes of the parameter, in
    order."""
    if first >= stop:
        return
    (low, _), rest = block[0], block[1:]
    if not rest:
        yield ((low + first, low + stop),)
        return
    inner = prod(b - a for a, b in rest)
    (top, x), (bottom, y) = divmod(first, inner), divmod(stop, inner)
    if top == bottom:
        yield from (((low + top, low + top + 1), *box) for box in _boxes(rest, x, y))
        return
    if x:
        yield from (((low + top, low + top + 1), *box) for box in _boxes(rest, x, inner))
        top += 1
    if top < bottom:
        yield ((low + top, low + bottom), *rest)
    yield from (((low + bottom, low + bottom + 1), *box) for box in _boxes(rest, 0, y))


def _number(block: Box, place: Sequence[int]) -> int:
    """Number of an element of the parameter in the flattened block."""
    number = 0
    for (low, high), at in zip(block, place, strict=True):
        number = number * (high - low) + at - low
    return number


def tiling_problem(parts: Sequence[BlockRange], shape: Sequence[int]) -> str | None:
    """None if the ranges hold every element of a parameter of `shape` exactly once, else what is
    wrong.

    Expects the cuts that layouts make: each dimension in consecutive runs, a block for each
    combination of them, and each block in consecutive ranges.
    """
    if not parts:
        return "nobody holds it"
    blocks: dict[Box, list[BlockRange]] = {}
    for part in parts:
        of = {dim: (start, stop) for dim, start, stop in part.cuts}
        blocks.setdefault(
            tuple(of.get(dim, (0, size)) for dim, size in enumerate(shape)), []
        ).append(part)
    runs = [sorted({block[dim] for block in blocks}) for dim in range(len(shape))]
    for dim, spans in enumerate(runs):
        if problem := _run_problem(spans, shape[dim], f"of dimension {dim}"):
            return problem
    for place in itertools.product(*runs):
        spans = sorted((part.offset, part.offset + part.length) for part in blocks.get(place, ()))
        block = ", ".join(f"{low}:{high}" for low, high in place) if len(blocks) > 1 else ""
        if problem := _run_problem(
            spans, prod(b - a for a, b in place), f"of its block {block}" if block else ""
        ):
            return problem
    return None


def _run_problem(spans: Sequence[tuple[int, int]], size: int, where: str) -> str | None:
    """None if the half-open spans, sorted, cover 0 to `size` without gap or overlap, else the first
    problem."""
    at = 0
    for start, stop in [*spans, (size, size)]:
        if start != at:
            word = "nobody holds" if start > at else "more than one hold"
            return f"{word} {min(at, start)} to {max(at, start)} {where}".rstrip()
        at = stop
    return None
