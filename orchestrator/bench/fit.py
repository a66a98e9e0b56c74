"""Rows of measured operations -> latency and rate of each tier, in the planner's own cost formulas.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from orchestrator.cluster.measured import Fit, Row
from orchestrator.planner.cost.collective import PATTERN, seconds
from orchestrator.planner.cost.dual import value_of
from orchestrator.planner.cost.fabric import Path


def fit(rows: Sequence[Row]) -> dict[str, Fit]:
    """By tier: each operation's own latency and rate, then the median latency, the best rate, and
    the others' factors.

    A rank of gloo, NCCL or MPI does not get the same out of a link with every operation, so one
    rate for all would be wrong for most. The factors are 1 or more, so that what the planner takes
    for a lower bound remains one.
    """
    result = {}
    for level in dict.fromkeys(row.level for row in rows):
        level_rows = [row for row in rows if row.level == level]
        lines = {
            name: _line([row for row in level_rows if row.operation == name])
            for name in dict.fromkeys(row.operation for row in level_rows)
        }
        latency = statistics.median(line[0] for line in lines.values())
        best = min(cost for _, cost in lines.values())
        stretch: dict[str, float] = {
            name: max(1.0, cost / best) for name, (_, cost) in lines.items()
        }
        errors = [
            abs(predicted(row, latency, best * stretch[row.operation]) / row.seconds - 1)
            for row in level_rows
        ]
        result[level] = Fit(1 / best, latency, stretch, sum(errors) / len(errors))
    return result


def predicted(row: Row, latency_s: float, seconds_per_byte: float) -> float:
    """What the planner's formula says; every hop of such a group is the same."""
    turn = latency_s * (row.ranks if PATTERN[row.operation] == "ring" else 1)
    path = Path(seconds_per_byte, 0.0, latency_s, turn, row.level, {row.level: 1.0})
    return value_of(seconds(row.operation, row.size, row.ranks, path))


def _line(rows: Sequence[Row]) -> tuple[float, float]:
    """(latency, seconds a byte), not negative, with the least squared relative error.

    The formula is linear in the two: each row gives a factor for each, and two normal equations are
    solved. Where they would make one negative it is put at nothing, or almost, and the other solved
    alone.
    """
    pairs = [
        (predicted(row, 1.0, 0.0) / row.seconds, predicted(row, 0.0, 1.0) / row.seconds)
        for row in rows
    ]
    aa, ab, bb = (sum(x[i] * x[j] for x in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in pairs) for i in (0, 1))
    det = aa * bb - ab * ab
    latency, cost = (
        ((a * bb - b * ab) / det, (b * aa - a * ab) / det)
        if det > 1e-9 * aa * bb
        else (0.0, b / bb)
    )
    if latency <= 0:
        return 0.0, b / bb
    return (latency, cost) if cost > 0 else (a / aa, 1e-15)
