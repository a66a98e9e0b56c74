"""Parameters that explain measured step times best, starting from priors: a robust
maximum-a-posteriori fit.

The cost model gives ln t and its derivatives in the logarithms of the parameters (`cost.dual`), so
each iteration is a linear least-squares problem (Gauss-Newton). Residuals are down-weighted beyond
`HUBER` (Huber 1964): a table holds rows that nobody can explain. A source counts as at most
`MOST_ROWS` rows, or long vendor tables would drown layout sweeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from orchestrator.cost.dual import Number, duals, log_gradient, value_of
from orchestrator.cost.numpy_import import np
from orchestrator.cost.parameters import NAMES, PRIOR
from orchestrator.cost.profile import NOISE
from orchestrator.cost.time.fabric import Floats

HUBER = 0.1  # residual of ln t beyond which a row counts less
MOST_ROWS = 25.0
ITERATIONS = 12


class Observation(NamedTuple):
    """A measured step. `step_s` predicts it from parameter values by name."""

    name: str
    source: str
    measured_s: float
    step_s: Callable[[Mapping[str, Number]], Number]
    row: int = 0  # of the table, from 0


class Fitted(NamedTuple):
    values: dict[str, float]
    covariance: Floats  # of the logarithms
    residuals: Floats  # ln(predicted / measured) of each observation


def linearised(
    observations: Sequence[Observation], values: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """(ln(predicted / measured), its Jacobian in ln parameters) of all observations."""
    numbers = duals(values)
    residuals = np.empty(len(observations))
    jacobian = np.zeros((len(observations), len(NAMES)))
    for index, observation in enumerate(observations):
        step = observation.step_s(numbers)
        residuals[index] = np.log(value_of(step) / observation.measured_s)
        jacobian[index] = log_gradient(step)
    return residuals, jacobian


def fit(
    observations: Sequence[Observation],
    start: Mapping[str, float] | None = None,
    fixed: Mapping[str, float] = MappingProxyType({}),
    first: tuple[Floats, Floats] | None = None,
) -> Fitted:
    """The most probable parameters. Repeatable: the same observations give the same bits on one
    machine.

    `fixed`: parameters that keep these values, as 1e-9 for a term that is left out. `first`: the
    observations linearised at `start`, where that is known.
    """
    mean = np.log([fixed.get(one.name, one.value) for one in PRIOR])
    precision = np.array([1e-6 if one.name in fixed else one.sd for one in PRIOR]) ** -2.0
    rows_by_source = Counter(one.source for one in observations)
    weights = (
        np.array([min(1.0, MOST_ROWS / rows_by_source[one.source]) for one in observations])
        / NOISE**2
    )
    theta = np.log([fixed.get(name, start[name]) for name in NAMES]) if start else mean.copy()
    residuals, jacobian = first or linearised(observations, _values(theta))
    normal = np.diag(precision)
    for _ in range(ITERATIONS):
        robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        normal = (jacobian.T * robust) @ jacobian + np.diag(precision)
        gradient = jacobian.T @ (robust * residuals) + precision * (theta - mean)
        step = -np.linalg.solve(normal, gradient)
        theta = theta + np.clip(step, -0.5, 0.5)
        residuals, jacobian = linearised(observations, _values(theta))
        if np.abs(step).max() < 1e-3:
            break
    covariance = np.asarray(np.linalg.inv(normal), dtype=np.float64)
    return Fitted(_values(theta), covariance, residuals)


def _values(theta: Floats) -> dict[str, float]:
    return {name: float(value) for name, value in zip(NAMES, np.exp(theta), strict=True)}


def by_source(observations: Sequence[Observation]) -> dict[str, list[int]]:
    """Indices of the observations of each source, sources in alphabetical order."""
    indices_by_source: dict[str, list[int]] = {}
    for index, observation in enumerate(observations):
        indices_by_source.setdefault(observation.source, []).append(index)
    return dict(sorted(indices_by_source.items()))


class LeftOutSource(NamedTuple):
    """A source as a fit to all others predicts it."""

    source: str
    at: list[int]  # indices of its observations
    residuals: Floats
    jacobian: Floats
    fitted: Fitted  # to the others


def leave_one_source_out(
    observations: Sequence[Observation],
    start: Mapping[str, float],
    fixed: Mapping[str, float] = MappingProxyType({}),
    tell: Callable[[int, int, str], None] = lambda done, total, source_name: None,
) -> Iterator[LeftOutSource]:
    """Each source in turn. `start`: values of the fit to all; `tell`: (done, of how many, source).

    The start has seen the source, so each fit goes on until its values move no more and nothing is
    left of it.
    """
    linearised_at_start = linearised(observations, {**start, **fixed})
    sources = by_source(observations)
    for done, (source, left_out_indices) in enumerate(sources.items()):
        tell(done, len(sources), source)
        other_indices = [
            index for index, observation in enumerate(observations) if observation.source != source
        ]
        others_at_start = (
            linearised_at_start[0][other_indices],
            linearised_at_start[1][other_indices],
        )
        fitted = fit(
            [observations[index] for index in other_indices], start, fixed, others_at_start
        )
        residuals, jacobian = linearised(
            [observations[index] for index in left_out_indices], fitted.values
        )
        yield LeftOutSource(source, left_out_indices, residuals, jacobian, fitted)
    tell(len(sources), len(sources), "")
