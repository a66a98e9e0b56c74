"""Where slices meet, against sets of element numbers."""

import itertools
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.geometry import BlockRange, overlaps, tiling_problem


@st.composite
def parts(draw, shape: tuple[int, ...]) -> BlockRange:
    """A flat range of a block that any dimensions are cut to."""
    cuts = []
    size = prod(shape)
    for dim in sorted(draw(st.sets(st.integers(0, len(shape) - 1)))):
        start = draw(st.integers(0, shape[dim] - 1))
        cuts.append((dim, start, draw(st.integers(start + 1, shape[dim]))))
        size = size // shape[dim] * (cuts[-1][2] - start)
    offset = draw(st.integers(0, size - 1))
    return BlockRange(tuple(cuts), offset, draw(st.integers(1, size - offset)))


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    return shape, draw(parts(shape)), draw(parts(shape))


def elements(part: BlockRange, shape: tuple[int, ...]) -> list[int]:
    """The numbers of a part's elements in the global parameter, in the part's order."""
    everything = torch.arange(prod(shape)).view(shape)
    for dim, start, stop in part.cuts:
        everything = everything.narrow(dim, start, stop - start)
    return everything.reshape(-1)[part.offset : part.offset + part.length].tolist()


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_what_two_slices_share_is_found_once_and_in_its_place(case):
    shape, left, right = case
    ours = elements(left, shape)
    theirs = elements(right, shape)
    found = []
    for one in overlaps(left, right, shape):
        for row in range(one.rows):
            for column in range(one.columns):
                number = ours[one.left_offset + row * one.left_step + column]
                assert number == theirs[one.right_offset + row * one.right_step + column]
                found.append(number)
    assert sorted(found) == sorted(set(ours) & set(theirs))


@st.composite
def tilings(draw):
    """Blocks of some dimensions, each in ranges: what a layout writes. Every part at least one
    element."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dims = sorted(draw(st.sets(st.integers(0, len(shape) - 1), max_size=2)))
    runs = [[(dim, *span) for span in itertools.pairwise(_cuts(draw, shape[dim]))] for dim in dims]
    result = []
    for block in itertools.product(*runs):
        size = prod(shape)
        for dim, start, stop in block:
            size = size // shape[dim] * (stop - start)
        edges = _cuts(draw, size)
        result += [BlockRange(block, low, high - low) for low, high in itertools.pairwise(edges)]
    return shape, draw(st.permutations(result))


def _cuts(draw, size: int) -> list[int]:
    return [
        0,
        *sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else []),
        size,
    ]


@given(tilings(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_tiling_is_accepted_and_any_part_lost_doubled_or_moved_is_not(case, data):
    shape, whole = case
    assert tiling_problem(whole, shape) is None
    index = data.draw(st.integers(0, len(whole) - 1))
    one = whole[index]
    rest = whole[:index] + whole[index + 1 :]
    assert tiling_problem(rest, shape) is not None
    assert tiling_problem([*whole, one], shape) is not None
    assert tiling_problem([*rest, one._replace(offset=one.offset + 1)], shape) is not None
    assert tiling_problem([*rest, one._replace(length=one.length + 1)], shape) is not None
