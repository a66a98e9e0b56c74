"""The order of ZB-H1 and ZB-H2: one forward, one input gradient, and the weight gradient of
`behind` micro-batches before."""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind


def postponed(
    stage: int,
    micro_batches: int,
    ahead: int,
    behind: int,
) -> Iterator[Action]:
    ahead = min(ahead, micro_batches)
    behind = min(behind, micro_batches)
    yield from (Action(Kind.F, stage, index) for index in range(ahead))
    for index in range(micro_batches):
        if index + ahead < micro_batches:
            yield Action(Kind.F, stage, index + ahead)
        yield Action(Kind.I, stage, index)
        if index >= behind:
            yield Action(Kind.W, stage, index - behind)
    yield from (
        Action(Kind.W, stage, index) for index in range(micro_batches - behind, micro_batches)
    )
