"""Fits the parameters to measured step times, starting from priors: a robust maximum-a-posteriori
fit.

The cost model returns ln t and its derivatives with respect to the logarithms of the parameters
(`cost.dual`), so each iteration solves a linear least-squares problem (Gauss-Newton). Residuals
beyond `HUBER` are down-weighted (Huber 1964), because a table has rows that no parameters explain.
A source counts as at most `MOST_ROWS` rows; otherwise long vendor tables would outweigh layout
sweeps.
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

HUBER = 0.1  # A row whose residual of ln t is larger counts less.
MOST_ROWS = 25.0
ITERATIONS = 12


class Observation(NamedTuple):
    """A measured step. `step_s` predicts its seconds from the values of the parameters by name."""

    name: str
    source: str
    measured_s: float
    step_s: Callable[[Mapping[str, Number]], Number]
    row: int = 0  # Index of its row in the table, from 0.


class Fitted(NamedTuple):
    values: dict[str, float]
    covariance: Floats  # Covariance of the logarithms of the parameters.
    residuals: Floats  # ln(predicted / measured) of each observation.


def linearised(
    observations: Sequence[Observation], values: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """Returns (ln(predicted / measured) of each observation, its Jacobian with respect to the
    logarithms of the parameters)."""
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
    """Returns the most probable parameters. The same observations give the same bits on the same
    machine.

    `fixed` maps parameters to values that they keep, such as 1e-9 for a term that is left out.
    `first` holds the observations linearised at `start`, if the caller has them already.
    """
    prior = _prior(fixed)
    weights = _weights(observations)
    theta = prior.mean.copy()
    if start:
        theta = np.log([fixed.get(name, start[name]) for name in NAMES])
    residuals, jacobian = first or linearised(observations, _values(theta))
    normal = np.diag(prior.precision)
    for _ in range(ITERATIONS):
        robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        normal = (jacobian.T * robust) @ jacobian + np.diag(prior.precision)
        from_prior = prior.precision * (theta - prior.mean)
        step = -np.linalg.solve(normal, jacobian.T @ (robust * residuals) + from_prior)
        theta = theta + np.clip(step, -0.5, 0.5)
        residuals, jacobian = linearised(observations, _values(theta))
        if np.abs(step).max() < 1e-3:
            break
    covariance = np.asarray(np.linalg.inv(normal), dtype=np.float64)
    return Fitted(_values(theta), covariance, residuals)


class _Prior(NamedTuple):
    mean: Floats  # Logarithms of the parameters.
    precision: Floats  # Inverse variances of these.


def _prior(fixed: Mapping[str, float]) -> _Prior:
    mean = np.log([fixed.get(parameter.name, parameter.value) for parameter in PRIOR])
    sd = [1e-6 if parameter.name in fixed else parameter.sd for parameter in PRIOR]
    return _Prior(mean, np.array(sd) ** -2.0)


def _weights(observations: Sequence[Observation]) -> Floats:
    """Returns the inverse variance of each observation, less for sources of many rows."""
    rows_by_source = Counter(observation.source for observation in observations)
    shares = [
        min(1.0, MOST_ROWS / rows_by_source[observation.source]) for observation in observations
    ]
    return np.array(shares) / NOISE**2


def _values(theta: Floats) -> dict[str, float]:
    return {name: float(value) for name, value in zip(NAMES, np.exp(theta), strict=True)}


def by_source(observations: Sequence[Observation]) -> dict[str, list[int]]:
    """Returns source -> indices of its observations, with the sources in alphabetical order."""
    indices_by_source: dict[str, list[int]] = {}
    for index, observation in enumerate(observations):
        indices_by_source.setdefault(observation.source, []).append(index)
    return dict(sorted(indices_by_source.items()))


class LeftOutSource(NamedTuple):
    """The predictions of one source by a fit to all the others."""

    source: str
    at: list[int]  # Indices of the source's observations.
    residuals: Floats
    jacobian: Floats
    fitted: Fitted  # The fit to the other sources.


def leave_one_source_out(
    observations: Sequence[Observation],
    start: Mapping[str, float],
    fixed: Mapping[str, float] = MappingProxyType({}),
    tell: Callable[[int, int, str], None] = lambda _done, _total, _source_name: None,
) -> Iterator[LeftOutSource]:
    """Leaves out each source in turn and predicts it by a fit to the others.

    `start` has the values of the fit to all sources. `tell` is called with (sources done, sources
    in all, name of the current source). The start has seen the source that is left out, so each fit
    iterates until its values no longer move and no trace of that source is left.
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
            [observations[index] for index in other_indices],
            start,
            fixed,
            others_at_start,
        )
        residuals, jacobian = linearised(
            [observations[index] for index in left_out_indices], fitted.values
        )
        yield LeftOutSource(source, left_out_indices, residuals, jacobian, fitted)
    tell(len(sources), len(sources), "")
