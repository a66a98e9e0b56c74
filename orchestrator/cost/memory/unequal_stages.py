"""Peak activation bytes of a pipeline rank whose stages keep unequal bytes.

Examples are an end of the model and a middle stage. The schedule gives the number of micro-batches
that each stage of a rank holds when a backward begins: DualPipe's first rank holds up to p of the
first stage and one of the last. If stages are alike, their sum is enough
(`cost.pipeline.in_flight`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from orchestrator.cost.numpy_import import np
from orchestrator.cost.time.fabric import Floats
from orchestrator.plan.schedules import SCHEDULES, Action, Kind, Schedule


class StageBytes(NamedTuple):
    """Bytes of one micro-batch in one stage of a rank."""

    stored: float  # from forward to backward, without what the loss keeps
    head: float = 0.0  # bytes that output projection and loss keep; 0 except in the last stage
    during: float = 0.0  # further bytes while a layer's backward runs
    deferred: float = 0.0  # bytes from I to W
    in_head: float = 0.0  # further bytes while the loss' I runs
    head_deferred: float = 0.0  # the part of `deferred` that is kept while the I of the layers runs
    in_last: float = 0.0  # further bytes in the last layer's I, when everything else is deferred


class Points(NamedTuple):
    """The moments before each backward of a rank."""

    full: Floats  # [points, stages] micro-batches before their backward
    deferred: Floats  # [points, stages] micro-batches between I and W
    active: np.ndarray[Any, np.dtype[np.intp]]  # [points] stage whose backward begins
    split: Floats  # [points] 1.0 if it is an I


def unequal_peak(
    schedule: Schedule | tuple[str, int, int, int],
    rank: int,
    held: tuple[int, ...],
    stages: Sequence[StageBytes],
) -> float:
    """Returns the peak activation bytes of pipeline rank `rank`.

    `schedule` is a table, or (name, pp, micro-batches, vpp). `held` has the model stages of the
    rank, and `stages` their bytes.
    """
    if isinstance(schedule, tuple):
        points = _counted(*schedule, rank, held)
    else:
        points = _points(schedule.orders[rank], held, schedule.model_stages)
    stored, head, during, deferred, in_head, head_deferred, in_last = np.array(stages).T
    active = points.active
    split = points.split
    held_bytes = points.full @ (stored + head) + points.deferred @ deferred
    in_layers = head_deferred[active] * split - head[active] + during[active]
    in_last_layer = np.where(
        split > 0,
        (deferred + in_last - stored - head)[active],
        -np.inf,
    )
    temporary = np.maximum(np.maximum(in_layers, in_last_layer), in_head[active] * split)
    return float((held_bytes + temporary).max())


@lru_cache(maxsize=1024)
def _counted(
    name: str,
    p: int,
    m: int,
    v: int,
    rank: int,
    held: tuple[int, ...],
) -> Points:
    """Returns the points of a schedule, cached.

    After a few rounds of micro-batches, further ones add no new points, unless all come before the
    first backward.
    """
    if name != "afab":
        m = min(m, 3 * p if m % p == 0 else 2 * p + 2 + m % 2)
    return _points(SCHEDULES[name].order(rank, p, m, v), held, p * v)


def _points(order: Iterable[Action], held: tuple[int, ...], model_stages: int) -> Points:
    """Returns the points of a rank's order of actions."""
    full = [0] * len(held)
    deferred = [0] * len(held)
    moments: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], None] = {}
    for kind, stage, _ in order:
        slot = held.index(stage % model_stages)
        if kind is Kind.F:
            full[slot] += 1
        elif kind is Kind.W:
            deferred[slot] -= 1
        else:
            moments[tuple(full), tuple(deferred), slot, kind is Kind.I] = None
            full[slot] -= 1
            deferred[slot] += kind is Kind.I
    full_counts, deferred_counts, active, split = zip(*moments, strict=True)
    return Points(
        full=np.array(full_counts, float),
        deferred=np.array(deferred_counts, float),
        active=np.array(active),
        split=np.array(split, float),
    )
