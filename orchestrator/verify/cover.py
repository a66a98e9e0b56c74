"""Covering arrays: a few rows that contain every legal combination of `strength` choices (Cohen et
al. 1997, "The AETG system", IEEE TSE 23(7); greedy, deterministic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

Row = tuple[int, ...]  # the choice on each axis; 0: the axis is not used
Legal = Callable[[Row], bool]
_Tuple = tuple[tuple[int, int], ...]  # (axis, choice), by axis


def cover(levels: Sequence[int], strength: int, legal: Legal) -> list[Row]:
    """Returns legal rows over axes with `levels[i]` choices (numbers 1 to levels[i], 0 for none).
    The rows together contain every combination of choices on `strength` axes that some legal row
    contains.

    A row with fewer axes of a legal row must be legal, too.
    """
    uncovered = {
        combination: None
        for combination in _tuples(levels, strength)
        if legal(_row(combination, len(levels)))
    }
    rows: list[Row] = []
    while uncovered:
        row = _row(next(iter(uncovered)), len(levels))
        row = _grow(row, levels, strength, uncovered, legal)
        for combination in combinations(_used(row), strength):
            uncovered.pop(combination, None)
        rows.append(row)
    return rows


def _grow(
    row: Row,
    levels: Sequence[int],
    strength: int,
    uncovered: dict[_Tuple, None],
    legal: Legal,
) -> Row:
    """Adds choices on further axes to a row, each time the one with the most uncovered
    combinations."""
    while True:
        best = None
        best_gain = 0
        for axis, count in enumerate(levels):
            if row[axis]:
                continue
            for choice in range(1, count + 1):
                candidate = (*row[:axis], choice, *row[axis + 1 :])
                gain = sum(
                    combination in uncovered
                    for combination in combinations(_used(candidate), strength)
                    if (axis, choice) in combination
                )
                if gain > best_gain and legal(candidate):
                    best = candidate
                    best_gain = gain
        if best is None:
            return row
        row = best


def _tuples(levels: Sequence[int], strength: int) -> Iterator[_Tuple]:
    for axes in combinations(range(len(levels)), strength):
        for choices in product(*(range(1, levels[axis] + 1) for axis in axes)):
            yield tuple(zip(axes, choices, strict=True))


def _row(combination: _Tuple, axes: int) -> Row:
    chosen = dict(combination)
    return tuple(chosen.get(axis, 0) for axis in range(axes))


def _used(row: Row) -> _Tuple:
    return tuple((axis, choice) for axis, choice in enumerate(row) if choice)
