"""Measures the error of predictions on sources that the profile has not seen, and the error that is
left after one of their rows was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from orchestrator.accuracy.predict.predict import Prediction
from orchestrator.accuracy.predict.score import ALL, MEAN, Errors, Score, mean_of_groups, score
from orchestrator.cost.numpy_import import np
from orchestrator.cost.profile import NOISE, Profile, between_sd
from orchestrator.cost.time.fabric import Floats

from .fit import Observation, by_source, leave_one_source_out, linearised
from .observations import observations
from .table import Tell, error
from .update import MOST_MISS, ROW_NOISE


class Unseen(NamedTuple):
    """The predictions of a source by a profile that has not seen it."""

    at: list[int]  # Indices of the source's observations.
    residuals: Floats  # ln(predicted / measured) of each observation.
    sd: Floats  # Standard deviations of the residuals.
    #: Mean error after one row was measured, averaged over every choice of the row. None if the
    #: source has a single row.
    after_one: float | None


def accuracy(
    rows: Sequence[Mapping[str, str]],
    predictions: Sequence[Prediction],
    profile: Profile,
    seen: bool,
    tell: Tell,
) -> Score:
    """Scores the predictions of a table.

    `predictions` has one prediction per row, made with `profile`. `seen` says that the profile was
    fitted to this table: each source is then predicted by a fit to the other sources.
    """
    observed_steps = observations(rows)
    fitted_score = score(rows, predictions)
    if not observed_steps:
        return fitted_score
    seen = seen and len({step.source for step in observed_steps}) > 1
    if seen:
        unseen = _left_out_sources(observed_steps, profile, tell)
    else:
        unseen = _other_sources(observed_steps, profile)
    unseen_predictions = list(predictions)
    for source in unseen.values():
        for index, miss, sd in zip(source.at, source.residuals, source.sd, strict=True):
            step = observed_steps[index]
            unseen_predictions[step.row] = unseen_predictions[step.row]._replace(
                step_time_s=step.measured_s * float(np.exp(miss)),
                step_sd=float(sd),
            )
    unseen_score = score(rows, unseen_predictions)
    fitted_means = {errors.group: errors.mean for errors in fitted_score.time} if seen else {}
    return unseen_score._replace(time=_with_means(unseen_score.time, fitted_means, unseen))


def _left_out_sources(
    observed_steps: Sequence[Observation],
    profile: Profile,
    tell: Tell,
) -> dict[str, Unseen]:
    """Returns each source as a fit to the other sources predicts it."""
    between = np.diag([between_sd(name) ** 2 for name in profile.values])
    unseen = {}
    for left_out in leave_one_source_out(observed_steps, profile.values, tell=tell):
        uncertainty = left_out.fitted.covariance + between
        unseen[left_out.source] = _unseen(
            left_out.at,
            left_out.residuals,
            left_out.jacobian,
            uncertainty,
        )
    return unseen


def _other_sources(observed_steps: Sequence[Observation], profile: Profile) -> dict[str, Unseen]:
    """Returns each source as the profile, which was fitted to other tables, predicts it."""
    residuals, jacobian = linearised(observed_steps, profile.values)
    return {
        source: _unseen(indices, residuals[indices], jacobian[indices], profile.uncertainty)
        for source, indices in by_source(observed_steps).items()
    }


def _with_means(
    time_errors: Sequence[Errors],
    fitted_means: Mapping[str, float],
    unseen: Mapping[str, Unseen],
) -> list[Errors]:
    """Returns the errors of step times with the means of the fit that has seen the rows, and with
    those after one row of a source was measured."""
    updated_errors = [
        errors._replace(
            fitted=fitted_means.get(errors.group),
            after_one=unseen[errors.group].after_one if errors.group in unseen else None,
        )
        for errors in time_errors
    ]
    groups = [errors for errors in updated_errors if errors.group not in (ALL, MEAN)]
    overall = [
        errors._replace(after_one=_mean_of_rows(groups))
        for errors in updated_errors
        if errors.group == ALL
    ]
    return [*groups, *overall, mean_of_groups(groups)]


def _mean_of_rows(groups: Sequence[Errors]) -> float | None:
    updated_groups = [group for group in groups if group.after_one is not None]
    rows = sum(group.rows for group in updated_groups)
    if not rows:
        return None
    return sum(group.rows * (group.after_one or 0.0) for group in updated_groups) / rows


def _unseen(
    indices: list[int],
    residuals: Floats,
    jacobian: Floats,
    uncertainty: Floats,
) -> Unseen:
    miss_covariance = jacobian @ uncertainty @ jacobian.T
    sd = np.sqrt(np.diag(miss_covariance) + NOISE**2)
    return Unseen(indices, residuals, sd, _after_one(residuals, miss_covariance))


def _after_one(residuals: Floats, miss_covariance: Floats) -> float | None:
    """Returns the mean error of the other rows after `update` by one row, averaged over every
    choice of that row. miss_covariance: J S J', float [rows, rows]."""
    count = len(residuals)
    if count < 2:
        return None
    clipped = np.clip(residuals, -MOST_MISS, MOST_MISS)
    # Float [rows, rows]: the change of row i after the update by row j.
    corrections = miss_covariance / (np.diag(miss_covariance) + ROW_NOISE**2) * clipped
    errors = error(residuals[:, None] - corrections)
    np.fill_diagonal(errors, 0.0)
    return float(errors.sum() / (count * (count - 1)))
