"""Computes intervals of predictions. If the logarithm of a prediction v has the standard deviation
sd, the measurement is 19 times in 20 in v exp(-1.96 sd) .. v exp(1.96 sd). `Time.sd` and
`Memory.sd` are such numbers; 0 means a prediction without an interval.
"""

from __future__ import annotations

from math import exp, log, sinh

SIGMAS = 1.96  # 95 % of a normal distribution


def interval(value: float, sd: float, sigmas: float = SIGMAS) -> tuple[float, float]:
    """(low, high) of a prediction; by default of its 95 % interval."""
    return value * exp(-sigmas * sd), value * exp(sigmas * sd)


def half_width(sd: float) -> float:
    """The number after a ±: half of the 95 % interval over the prediction."""
    return sinh(SIGMAS * sd)


def plus_minus(sd: float) -> str:
    """Formats the interval of a prediction as ` ±12%`; "" if it has none."""
    return f" ±{half_width(sd):.0%}" if sd > 0 else ""


def standard_score(measured: float, predicted: float, sd: float) -> float | None:
    """The number of standard deviations by which a measurement exceeds its prediction; None without
    an interval."""
    return log(measured / predicted) / sd if sd > 0 and measured > 0 else None
