"""Turns a script such as "F0 F1 I1 W1" into actions by counting: the n-th F0 is micro-batch n of
the rank's chunk 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .actions import Action, Kind

#: (kind, chunk). A W has the chunk and micro-batch of the oldest I without a W.
Step = tuple[Kind, int]


def count(
    script: Iterable[Step],
    stages: tuple[int, int],
    firsts: tuple[int, int],
    micro_batches: int,
) -> Iterator[Action]:
    """Yields the actions of one rank, whose chunk c is stage `stages[c]` and computes
    `micro_batches` micro-batches from `firsts[c]` on.

    Steps beyond the last micro-batch are left out, so a script for a full pipeline also serves
    fewer micro-batches. It stays valid, because leaving out whole micro-batches removes constraints
    and adds none.
    """
    forward = Kind.F
    weight = Kind.W
    split = Kind.I  # read once: attributes of an enumeration are slow
    make = tuple.__new__  # a third of the time of `Action(...)`
    forwards = [0, 0]
    backwards = [0, 0]  # B and I of a chunk count together
    owed: deque[tuple[int, int]] = deque()
    for kind, chunk in script:
        if kind is weight:
            chunk, index = owed.popleft()
        else:
            seen = forwards if kind is forward else backwards
            index = seen[chunk]
            seen[chunk] = index + 1
            if kind is split:
                owed.append((chunk, index))
        if index < micro_batches:
            yield make(Action, (kind, stages[chunk], firsts[chunk] + index))
