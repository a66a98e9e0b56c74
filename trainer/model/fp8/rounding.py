"""Rounding to 8 bits (e4m3, e5m2: Micikevicius et al., arXiv 2209.05433) with a scale per tensor or
per block.

A rank may hold a slice of a tensor. Its `Dimension`s know which blocks of the whole tensor the
slice meets; a block that several ranks hold has one scale, that of its largest value on all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
#: Bounds scales, so that they stay finite in fp32 even for a tensor of zeros.
LEAST = 2.0**-100
#: Largest values of this rank's slices -> those of the tensors of one process.
Largest = Callable[[Tensor], Tensor]


class Rounded(NamedTuple):
    """A tensor in 8 bits: its values are `codes` * `unit`."""

    codes: Tensor  # float8
    unit: Tensor  # broadcasts against `codes`, or by blocks of it


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def round_to(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Rounded:
    """Rounds `x` with the scale of `largest`, which broadcasts against it. Larger values become the
    largest number; nan stays."""
    max_code = torch.finfo(dtype).max
    scale = max_code / largest.to(accumulation_dtype(x.dtype)).clamp(min=LEAST)
    return Rounded(
        to_float8((x.to(scale.dtype) * scale).clamp(-max_code, max_code), dtype),
        1 / scale,
    )


def to_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds `x` to fp32 and then to float8, as a device does.

    Rows of products of few numbers of 8 bits, divided by their largest one, often are exactly
    halfway between two numbers. In fp64 the last digits of sums, which layouts do not share, would
    decide such a rounding; fp32 does not have them, so it goes to the even number.
    """
    return x.float().to(dtype)


class Blocks(NamedTuple):
    """The blocks that the elements of one dimension of a slice are in."""

    of_elements: Tensor  # int64 [elements]: the index in `numbers` of each element's block
    numbers: Tensor  # int64 [blocks of the slice]: their numbers in the whole tensor
    total: int  # blocks of the whole tensor

    @classmethod
    def at(cls, positions: Tensor, size: int, length: int) -> Blocks:
        """The blocks of `size` elements of those at `positions` in a dimension of `length`."""
        numbers, of_elements = (positions // size).unique(return_inverse=True)
        return cls(of_elements, numbers, -(-length // size))

    @property
    def broadcasts(self) -> bool:
        """Whether a tensor with one element per block broadcasts against one with all elements:
        there is one block, or one per element."""
        return len(self.numbers) in (1, len(self.of_elements))


class Dimension:
    """One dimension of a tensor, which no ranks cut."""

    def blocks(self, elements: int, size: int) -> Blocks:
        """The blocks of `size` elements of a slice with `elements` of them."""
        count = -(-elements // size)
        return Blocks(torch.arange(elements) // size, torch.arange(count), count)

    def largest(self, size: int) -> Largest | None:
        """The largest values of blocks over the ranks that hold some of the same block; None if
        slices hold whole blocks."""
        return None


class Stack(Dimension):
    """Equal dimensions, one after the other: no block is in two of them."""

    def __init__(self, count: int, dimension: Dimension):
        self.count = count
        self.dimension = dimension

    def blocks(self, elements: int, size: int) -> Blocks:
        first = self.dimension.blocks(elements // self.count, size)
        indices = torch.arange(self.count)[:, None]
        of_elements = first.of_elements + indices * len(first.numbers)
        numbers = first.numbers + indices * first.total
        return Blocks(of_elements.flatten(), numbers.flatten(), self.count * first.total)

    def largest(self, size: int) -> Largest | None:
        return self.dimension.largest(size)


UNCUT = Dimension()


class Grid:
    """The blocks of a matrix, `rows` x `columns` elements large, each with a scale."""

    def __init__(
        self,
        rows: int,
        columns: int,
        row_dimension: Dimension = UNCUT,
        column_dimension: Dimension = UNCUT,
    ):
        self.sizes = (rows, columns)
        dimensions = (row_dimension, column_dimension)
        # A single row or column is a slice of its own.
        self.dimensions = tuple(
            UNCUT if size == 1 else dimension
            for size, dimension in zip(self.sizes, dimensions, strict=True)
        )

    def round(self, x: Tensor, dtype: torch.dtype = E4M3) -> Rounded:
        """Rounds a slice [m, n]: -> codes [m, n], and the units of its blocks."""
        x = x.detach()
        rows, columns = self._blocks(x.shape)
        largest = x.abs()
        for dim, blocks in enumerate((rows, columns)):
            largest = _largest_of_blocks(largest, dim, blocks)
        for dimension, size in zip(self.dimensions, self.sizes, strict=True):
            over_ranks = dimension.largest(size)
            if over_ranks is not None:
                numbers = (rows.numbers[:, None], columns.numbers)
                table = largest.new_zeros(rows.total, columns.total)
                table[numbers] = largest
                largest = over_ranks(table)[numbers]
        codes, _ = round_to(x, _spread(largest, rows, columns), dtype)
        wide = largest.to(accumulation_dtype(x.dtype))
        return Rounded(codes, wide.clamp(min=LEAST) / torch.finfo(dtype).max)

    def values(self, rounded: Rounded, dtype: torch.dtype) -> Tensor:
        """Returns the values [m, n] of what `round` returned."""
        rows, columns = self._blocks(rounded.codes.shape)
        return rounded.codes.to(dtype) * _spread(rounded.unit, rows, columns)

    def rounded_values(self, x: Tensor, dtype: torch.dtype, code: torch.dtype = E4M3) -> Tensor:
        """Returns `x` [m, n] as it is in 8 bits."""
        return self.values(self.round(x, code), dtype)

    def _blocks(self, shape: torch.Size) -> tuple[Blocks, Blocks]:
        m, n = shape
        rows, columns = self.dimensions
        row_size, column_size = self.sizes
        return rows.blocks(m, row_size), columns.blocks(n, column_size)


def _largest_of_blocks(x: Tensor, dim: int, blocks: Blocks) -> Tensor:
    """Returns the largest of the positive numbers `x` [m, n] in each block of a dimension."""
    count = len(blocks.numbers)
    if count == x.shape[dim]:
        return x
    if count == 1:
        return x.amax(dim, keepdim=True)
    shape = list(x.shape)
    shape[dim] = count
    index = blocks.of_elements if dim else blocks.of_elements[:, None]
    return x.new_zeros(shape).scatter_reduce_(dim, index.expand_as(x), x, "amax")


def _spread(largest: Tensor, rows: Blocks, columns: Blocks) -> Tensor:
    """One value per block -> one per element, [m, n] (or what broadcasts to it)."""
    if not rows.broadcasts:
        largest = largest.index_select(0, rows.of_elements)
    return largest if columns.broadcasts else largest.index_select(1, columns.of_elements)
