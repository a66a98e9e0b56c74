"""Parameters after one more measurement: a Bayesian update that moves the terms that caused the miss.

For a measured step with z = ln(predicted / measured) and d ln t / d ln parameter = J, the posterior of a linear model
with covariance S and noise s is theta - S J z / (J S J + s^2) (Kalman 1960). A miss is cut at 0.3, so that one odd
row cannot turn the model around (accuracy.md section 4). The prediction moves with the parameters, others with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.cost.parameters import NAMES
from orchestrator.planner.cost.profile import Profile

Floats = NDArray[np.float64]
ROW_NOISE = 0.10  # standard deviation of ln t of one measured row
MOST_MISS = 0.3


class Update(NamedTuple):
    log_change: Floats  # of each parameter
    covariance: Floats

    def values(self, profile: Profile) -> dict[str, float]:
        return {name: profile.values[name] * float(np.exp(self.log_change[at])) for at, name in enumerate(NAMES)}


def update(profile: Profile, misses: Sequence[float], jacobian: Floats, noise: float = ROW_NOISE) -> Update:
    """misses: ln(predicted / measured) of each measurement; jacobian: float [measurements, parameters]."""
    spread = profile.uncertainty
    clipped = np.clip(np.asarray(misses, dtype=float), -MOST_MISS, MOST_MISS)
    gain = spread @ jacobian.T
    inner = jacobian @ gain + noise**2 * np.eye(len(clipped))
    covariance = spread - gain @ np.linalg.solve(inner, gain.T)
    return Update(-gain @ np.linalg.solve(inner, clipped), (covariance + covariance.T) / 2)


def attribution(change: Update, jacobian: Floats, most: int = 3) -> list[tuple[str, float]]:
    """(parameter, its part of the change of ln t), the largest first. jacobian: float [parameters]."""
    parts = change.log_change * jacobian
    order = sorted(range(len(parts)), key=lambda at: -abs(parts[at]))
    return [(NAMES[at], float(parts[at])) for at in order[:most] if parts[at]]
