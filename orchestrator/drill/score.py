"""What many trials come to: success rate, and how soon. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .trial import Trial


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)] if values else None


def score(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """A row for each fault and position, in the order in which they first came."""
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.fault, trial.position), []).append(trial)
    return [{"fault": fault, "position": position, **_row(mine)} for (fault, position), mine in rows.items()]


def _row(trials: list[Trial]) -> dict[str, Any]:
    good = [trial for trial in trials if trial.ok]
    row: dict[str, Any] = {"trials": len(trials), "recovered": len(good), "rate": len(good) / len(trials)}
    for name in ("noticed_s", "stepping_s"):
        values = [value for trial in good if (value := getattr(trial, name)) is not None]
        row[name] = {"p50": quantile(values, 0.5), "p95": quantile(values, 0.95), "max": max(values, default=None)}
    lost = [trial.lost_steps for trial in good if trial.lost_steps is not None]
    row["lost_steps"] = {"p50": quantile(lost, 0.5), "max": max(lost, default=None)}
    row["problems"] = [trial.problem for trial in trials if trial.problem]
    return row
