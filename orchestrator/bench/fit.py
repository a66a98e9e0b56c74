"""Fits latency and rate of each tier to rows of measured operations, in the planner's own cost
formulas. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from orchestrator.cluster.measured import Fit, Row
from orchestrator.cost.dual import value_of
from orchestrator.cost.time.collective import PATTERN, seconds
from orchestrator.cost.time.fabric import Path


def fit(rows: Sequence[Row]) -> dict[str, Fit]:
    """Returns the fit of each tier: the median latency and the best rate of its operations, and a
    factor for each of them.

    A rank of gloo, NCCL or MPI gets a different rate from a link with every operation, so one rate
    for all would be wrong for most. The factors are 1 or more, so that the planner's lower bounds
    remain lower bounds.
    """
    levels = dict.fromkeys(row.level for row in rows)
    return {level: _fit_level([row for row in rows if row.level == level]) for level in levels}


def _fit_level(rows: Sequence[Row]) -> Fit:
    operations = dict.fromkeys(row.operation for row in rows)
    lines = {
        operation: _line([row for row in rows if row.operation == operation])
        for operation in operations
    }
    latency = statistics.median(line[0] for line in lines.values())
    best_cost = min(cost for _, cost in lines.values())
    stretch: dict[str, float] = {
        operation: max(1.0, cost / best_cost) for operation, (_, cost) in lines.items()
    }
    errors = [
        abs(predicted(row, latency, best_cost * stretch[row.operation]) / row.seconds - 1)
        for row in rows
    ]
    return Fit(1 / best_cost, latency, stretch, sum(errors) / len(errors))


def predicted(row: Row, latency_s: float, seconds_per_byte: float) -> float:
    """Returns the seconds of the planner's formula; every hop of such a group is the same."""
    hops = row.ranks if PATTERN[row.operation] == "ring" else 1
    shares = {row.level: 1.0}
    path = Path(
        seconds_per_byte,
        0.0,
        latency_s,
        latency_s * hops,
        row.level,
        shares,
    )
    return value_of(seconds(row.operation, row.size, row.ranks, path))


def _line(rows: Sequence[Row]) -> tuple[float, float]:
    """Returns (latency, seconds per byte), not negative, with the least squared relative error.

    The formula is linear in the two: each row gives a factor for each, and two normal equations
    are solved. If they make one of the two negative, that one is set to zero, or almost, and the
    other is solved alone.
    """
    pairs = [
        (predicted(row, 1.0, 0.0) / row.seconds, predicted(row, 0.0, 1.0) / row.seconds)
        for row in rows
    ]
    aa = sum(x * x for x, _ in pairs)
    ab = sum(x * y for x, y in pairs)
    bb = sum(y * y for _, y in pairs)
    a = sum(x for x, _ in pairs)
    b = sum(y for _, y in pairs)
    det = aa * bb - ab * ab
    if det > 1e-9 * aa * bb:
        latency = (a * bb - b * ab) / det
        cost = (b * aa - a * ab) / det
    else:
        latency = 0.0
        cost = b / bb
    if latency <= 0:
        return 0.0, b / bb
    return (latency, cost) if cost > 0 else (a / aa, 1e-15)
