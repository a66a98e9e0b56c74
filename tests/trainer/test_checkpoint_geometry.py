"""Where slices meet, against sets of element numbers."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.geometry import BlockRange, overlaps, tiling_problem


@st.composite
def parts(draw, shape: tuple[int, ...], dim: int) -> BlockRange:
    """A flat range of a block of `dim`, of a block of dimension 0, or of the whole."""
    along = draw(st.sampled_from([None, 0, dim]))
    start = stop = 0
    if along is not None:
        start = draw(st.integers(0, shape[along] - 1))
        stop = draw(st.integers(start + 1, shape[along]))
    size = prod(shape) if along is None else prod(shape) // shape[along] * (stop - start)
    offset = draw(st.integers(0, size - 1))
    return BlockRange(along, start, stop, offset, draw(st.integers(1, size - offset)))


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    return shape, draw(parts(shape, dim)), draw(parts(shape, dim))


def elements(part: BlockRange, shape: tuple[int, ...]) -> list[int]:
    """The numbers of a part's elements in the global parameter, in the part's order."""
    everything = torch.arange(prod(shape)).view(shape)
    if part.dim is not None:
        everything = everything.narrow(part.dim, part.start, part.stop - part.start)
    return everything.reshape(-1)[part.offset : part.offset + part.length].tolist()


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_what_two_slices_share_is_found_once_and_in_its_place(case):
    shape, left, right = case
    ours, theirs = elements(left, shape), elements(right, shape)
    found = []
    for one in overlaps(left, right, shape):
        for row in range(one.rows):
            for column in range(one.columns):
                number = ours[one.left + row * one.left_step + column]
                assert number == theirs[one.right + row * one.right_step + column]
                found.append(number)
    assert sorted(found) == sorted(set(ours) & set(theirs))


def test_two_inner_dimensions_are_refused():
    with pytest.raises(ValueError, match="dimensions 1 and 2"):
        overlaps(BlockRange(1, 0, 1, 0, 1), BlockRange(2, 0, 1, 0, 1), (2, 2, 2))


@st.composite
def tilings(draw):
    """Blocks of one dimension, each in ranges: what a layout writes. Every part at least one element."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    cuts = [0, prod(shape)] if dim is None else _cuts(draw, shape[dim])
    result = []
    for start, stop in itertools.pairwise(cuts):
        size = prod(shape) if dim is None else prod(shape) // shape[dim] * (stop - start)
        edges = _cuts(draw, size)
        block = (None, 0, 0) if dim is None else (dim, start, stop)
        result += [BlockRange(*block, low, high - low) for low, high in itertools.pairwise(edges)]
    return shape, draw(st.permutations(result))


def _cuts(draw, size: int) -> list[int]:
    return [0, *sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else []), size]


@given(tilings(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_tiling_is_accepted_and_any_part_lost_doubled_or_moved_is_not(case, data):
    shape, whole = case
    assert tiling_problem(whole, shape) is None
    index = data.draw(st.integers(0, len(whole) - 1))
    one, rest = whole[index], whole[:index] + whole[index + 1 :]
    assert tiling_problem(rest, shape) is not None
    assert tiling_problem([*whole, one], shape) is not None
    assert tiling_problem([*rest, one._replace(offset=one.offset + 1)], shape) is not None
    assert tiling_problem([*rest, one._replace(length=one.length + 1)], shape) is not None
