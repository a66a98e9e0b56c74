"""Turn a script such as "F0 F1 I1 W1" into actions by counting: the n-th F0 is micro-batch n of the
rank's chunk 0."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from .actions import Action, Kind

Step = tuple[
    Kind, int
]  # (kind, chunk); a W takes the chunk and micro-batch of the oldest I that has none yet


def count(
    script: Iterable[Step], stages: tuple[int, int], firsts: tuple[int, int], micro_batches: int
) -> Iterator[Action]:
    """Actions of one rank whose chunk c is stage `stages[c]` and sees micro-batches `firsts[c]` ...
    + `each`.

    Steps beyond the last micro-batch are left out: a script written for a full pipeline then also
    serves fewer micro-batches, and stays valid, because leaving out whole micro-batches removes
    constraints and adds none.
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
