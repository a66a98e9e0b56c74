"""Parameters that explain measured step times best, starting from priors: a robust maximum-a-posteriori fit.

The cost model gives ln t and its derivatives in the logarithms of the parameters (`cost.dual`), so each iteration is a
linear least-squares problem (Gauss-Newton). Residuals are down-weighted beyond `HUBER` (Huber 1964): a table holds rows
that nobody can explain. A source counts as at most `MOST_ROWS` rows, or long vendor tables would drown layout sweeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.cost.dual import Dual, Number, duals
from orchestrator.planner.cost.parameters import NAMES, PRIOR
from orchestrator.planner.cost.profile import NOISE

Floats = NDArray[np.float64]

HUBER = 0.1  # residual of ln t beyond which a row counts less
MOST_ROWS = 25.0
ITERATIONS = 12


class Observation(NamedTuple):
    """A measured step. `step_s` predicts it from parameter values by name."""

    name: str
    source: str
    measured_s: float
    step_s: Callable[[Mapping[str, Number]], Number]


class Fitted(NamedTuple):
    values: dict[str, float]
    covariance: Floats  # of the logarithms
    residuals: Floats  # ln(predicted / measured) of each observation


def linearised(observations: Sequence[Observation], values: Mapping[str, float]) -> tuple[Floats, Floats]:
    """(ln(predicted / measured), its Jacobian in ln parameters) of all observations."""
    numbers = duals(values)
    residuals, jacobian = np.empty(len(observations)), np.zeros((len(observations), len(NAMES)))
    for index, one in enumerate(observations):
        step = one.step_s(numbers)
        assert isinstance(step, Dual)
        residuals[index] = np.log(step.value / one.measured_s)
        jacobian[index] = step.grad / step.value
    return residuals, jacobian


def fit(
    observations: Sequence[Observation], start: Mapping[str, float] | None = None, iterations: int = ITERATIONS
) -> Fitted:
    """The most probable parameters. Repeatable: the same observations give the same bits on one machine."""
    mean = np.log([one.value for one in PRIOR])
    precision = np.array([one.sd for one in PRIOR]) ** -2.0
    rows = Counter(one.source for one in observations)
    weight = np.array([min(1.0, MOST_ROWS / rows[one.source]) for one in observations]) / NOISE**2
    theta = np.log([start[name] for name in NAMES]) if start else mean.copy()
    residuals, jacobian = linearised(observations, dict(zip(NAMES, np.exp(theta), strict=True)))
    normal = np.diag(precision)
    for _ in range(iterations):
        robust = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        normal = (jacobian.T * robust) @ jacobian + np.diag(precision)
        gradient = jacobian.T @ (robust * residuals) + precision * (theta - mean)
        step = -np.linalg.solve(normal, gradient)
        theta = theta + np.clip(step, -0.5, 0.5)
        residuals, jacobian = linearised(observations, dict(zip(NAMES, np.exp(theta), strict=True)))
        if np.abs(step).max() < 1e-3:
            break
    values = {name: float(value) for name, value in zip(NAMES, np.exp(theta), strict=True)}
    covariance = np.asarray(np.linalg.inv(normal), dtype=np.float64)
    return Fitted(values, covariance, residuals)
