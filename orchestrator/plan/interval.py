"""Intervals of predictions: a prediction v with standard deviation sd of its logarithm lies, 19
times in 20, in v exp(-1.96 sd) .. v exp(1.96 sd). `Time.sd` and `Memory.sd` are such numbers; 0 is
a prediction without an interval.
"""

from __future__ import annotations

from math import exp, log, sinh

SIGMAS = 1.96  # 95 % of a normal distribution


def interval(value: float, sd: float, sigmas: float = SIGMAS) -> tuple[float, float]:
    """(low, high) of a prediction, 95 % unless told otherwise."""
    return value * exp(-sigmas * sd), value * exp(sigmas * sd)


def half_width(sd: float) -> float:
    """The one number behind a ±: half of the 95 % interval over the prediction."""
    return sinh(SIGMAS * sd)


def plus_minus(sd: float) -> str:
    """` ±12 %` behind a prediction; nothing where it has no interval."""
    return f" ±{half_width(sd):.0%}" if sd > 0 else ""


def standard_score(measured: float, predicted: float, sd: float) -> float | None:
    """How many standard deviations a measurement lies above its prediction; None without an
    interval."""
    return log(measured / predicted) / sd if sd > 0 and measured > 0 else None
