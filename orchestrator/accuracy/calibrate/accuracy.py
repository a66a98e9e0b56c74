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

from .fit import by_source, leave_one_source_out, linearised
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
    if not observed_steps:
        return score(rows, predictions)
    fitted_score = score(rows, predictions)
    if seen and len({one.source for one in observed_steps}) > 1:
        between = np.diag([between_sd(name) ** 2 for name in profile.values])
        unseen = {
            left_out.source: _unseen(
                left_out.at,
                left_out.residuals,
                left_out.jacobian,
                left_out.fitted.covariance + between,
            )
            for left_out in leave_one_source_out(observed_steps, profile.values, tell=tell)
        }
    else:
        seen = False
        residuals, jacobian = linearised(observed_steps, profile.values)
        unseen = {
            source: _unseen(indices, residuals[indices], jacobian[indices], profile.uncertainty)
            for source, indices in by_source(observed_steps).items()
        }
    unseen_predictions = list(predictions)
    for group in unseen.values():
        for index, miss, sd in zip(group.at, group.residuals, group.sd, strict=True):
            one = observed_steps[index]
            predicted = one.measured_s * float(np.exp(miss))
            unseen_predictions[one.row] = unseen_predictions[one.row]._replace(
                step_time_s=predicted, step_sd=float(sd)
            )
    unseen_score = score(rows, unseen_predictions)
    fitted_means = {one.group: one.mean for one in fitted_score.time} if seen else {}
    means_after_one = {source: one.after_one for source, one in unseen.items()}
    time_errors = [
        one._replace(fitted=fitted_means.get(one.group), after_one=means_after_one.get(one.group))
        for one in unseen_score.time
    ]
    groups = [one for one in time_errors if one.group not in (ALL, MEAN)]
    overall = [
        one._replace(after_one=_mean_of_rows(groups)) for one in time_errors if one.group == ALL
    ]
    return unseen_score._replace(time=[*groups, *overall, mean_of_groups(groups)])


def _mean_of_rows(groups: Sequence[Errors]) -> float | None:
    updated_groups = [group for group in groups if group.after_one is not None]
    rows = sum(group.rows for group in updated_groups)
    return (
        sum(group.rows * (group.after_one or 0.0) for group in updated_groups) / rows
        if rows
        else None
    )


def _unseen(indices: list[int], residuals: Floats, jacobian: Floats, uncertainty: Floats) -> Unseen:
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
