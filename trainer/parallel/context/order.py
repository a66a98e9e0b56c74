"""The sequence positions that each context-parallel rank holds, and the blocks that it may attend
to. Pure.

Methods: "zigzag" (ring over balanced shards), "ring" (ring over contiguous shards), "allgather"
(keys and values gathered, balanced shards), "ulysses" (contiguous shards, heads exchanged for
sequence; arXiv 2309.14509). Zig-zag: the sequence is cut into 2n chunks and rank i holds chunks i
and 2n-1-i, so that every rank has the same number of causal pairs (Ultra-Scale Playbook, "Zig-Zag
Ring Attention"; Llama 3, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.plan.supported import BALANCED


def chunks(method: str, seq_len: int, size: int, index: int) -> list[range]:
    """Returns the global positions of rank `index` of `size`, as ascending ranges of equal length.

    Raises ValueError if the sequence cannot be cut evenly.
    """
    count = 2 * size if method in BALANCED else size
    if seq_len % count:
        raise ValueError(
            f"cp={size} with {method!r} needs a sequence length divisible by {count}, got {seq_len}"
        )
    length = seq_len // count
    numbers = (index, count - 1 - index) if method in BALANCED else (index,)
    return [range(number * length, (number + 1) * length) for number in numbers]


def positions(method: str, seq_len: int, size: int, index: int) -> list[int]:
    """Returns the global positions of rank `index` of `size`, ascending."""
    return [position for chunk in chunks(method, seq_len, size, index) for position in chunk]


def part(ranges: Sequence[range], rows: slice) -> tuple[range, ...]:
    """Returns the positions of a rank's tokens `rows`, given its `ranges` of equal length, none of
    which `rows` cuts."""
    length = len(ranges[0])
    begin, end, _ = rows.indices(length * len(ranges))
    return tuple(ranges[begin // length : end // length])


def natural_order(method: str, seq_len: int, size: int) -> list[int]:
    """Returns the permutation that puts the concatenated shards of all ranks into sequence
    order."""
    concatenated = [
        position for index in range(size) for position in positions(method, seq_len, size, index)
    ]
    order = [0] * seq_len
    for index, position in enumerate(concatenated):
        order[position] = index
    return order


@dataclass(frozen=True)
class Visible:
    """The slices of the local queries and of another rank's keys that attend, and whether they
    attend causally (on the diagonal)."""

    queries: slice
    keys: slice
    causal: bool


ALL = slice(None)
#: Without causality every query sees every key.
EVERYTHING = Visible(ALL, ALL, causal=False)


def visible(method: str, local_len: int, index: int, source: int) -> Visible | None:
    """Returns the part of rank `source`'s keys that rank `index` attends to under a causal mask, or
    None.

    Shards are ascending, so a rank's own keys are one causal square. In zig-zag, keys from an
    earlier rank are seen by all queries but only in their first half; keys from a later rank are
    seen whole, by the second half of the queries.
    """
    if source == index:
        return Visible(ALL, ALL, causal=True)
    if method not in BALANCED:
        return Visible(ALL, ALL, causal=False) if source < index else None
    half = local_len // 2
    if source < index:
        return Visible(ALL, slice(0, half), causal=False)
    return Visible(slice(half, None), ALL, causal=False)
