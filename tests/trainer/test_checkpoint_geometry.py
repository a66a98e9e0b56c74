"""The overlaps of slices are compared with sets of element numbers."""

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


def elements(block: BlockRange, shape: tuple[int, ...]) -> list[int]:
    """The numbers of a part's elements in the global parameter, in the part's order."""
    everything = torch.arange(prod(shape)).view(shape)
    for dim, start, stop in block.cuts:
        everything = everything.narrow(dim, start, stop - start)
    return everything.reshape(-1)[block.offset : block.offset + block.length].tolist()


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_what_two_slices_share_is_found_once_and_in_its_place(case):
    shape, first, second = case
    ours = elements(first, shape)
    theirs = elements(second, shape)
    shared = []
    for overlap in overlaps(first, second, shape):
        for row in range(overlap.rows):
            for column in range(overlap.columns):
                number = ours[overlap.left_offset + row * overlap.left_step + column]
                assert number == theirs[overlap.right_offset + row * overlap.right_step + column]
                shared.append(number)
    assert sorted(shared) == sorted(set(ours) & set(theirs))


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
    shape, tiling = case
    assert tiling_problem(tiling, shape) is None
    index = data.draw(st.integers(0, len(tiling) - 1))
    block = tiling[index]
    rest = tiling[:index] + tiling[index + 1 :]
    assert tiling_problem(rest, shape) is not None
    assert tiling_problem([*tiling, block], shape) is not None
    assert tiling_problem([*rest, block._replace(offset=block.offset + 1)], shape) is not None
    assert tiling_problem([*rest, block._replace(length=block.length + 1)], shape) is not None
