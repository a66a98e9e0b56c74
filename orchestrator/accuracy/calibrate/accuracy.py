"""How far predictions are off on sources that the profile has not seen, and after one of their rows
was measured."""

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
    """A source as a profile predicts it that has not seen it."""

    at: list[int]  # indices of its observations
    residuals: Floats  # ln(predicted / measured)
    sd: Floats  # of it
    after_one: (
        float | None
    )  # mean error after one row, over every choice of the row; None of a single row


def accuracy(
    rows: Sequence[Mapping[str, str]],
    predictions: Sequence[Prediction],
    profile: Profile,
    seen: bool,
    tell: Tell,
) -> Score:
    """The score of a table. `seen`: the profile was fitted to it, so each source is predicted by a
    fit to the others.

    `predictions`: of all rows, by `profile`.
    """
    found = observations(rows)
    if not found:
        return score(rows, predictions)
    fitted = score(rows, predictions)
    if seen and len({one.source for one in found}) > 1:
        between = np.diag([between_sd(name) ** 2 for name in profile.values])
        unseen = {
            left.source: _unseen(
                left.at, left.residuals, left.jacobian, left.fitted.covariance + between
            )
            for left in leave_one_source_out(found, profile.values, tell=tell)
        }
    else:
        seen = False
        residuals, jacobian = linearised(found, profile.values)
        unseen = {
            source: _unseen(at, residuals[at], jacobian[at], profile.uncertainty)
            for source, at in by_source(found).items()
        }
    changed = list(predictions)
    for group in unseen.values():
        for index, miss, sd in zip(group.at, group.residuals, group.sd, strict=True):
            one = found[index]
            predicted = one.measured_s * float(np.exp(miss))
            changed[one.row] = changed[one.row]._replace(step_time_s=predicted, step_sd=float(sd))
    result = score(rows, changed)
    before = {one.group: one.mean for one in fitted.time} if seen else {}
    after = {source: one.after_one for source, one in unseen.items()}
    time = [
        one._replace(fitted=before.get(one.group), after_one=after.get(one.group))
        for one in result.time
    ]
    groups = [one for one in time if one.group not in (ALL, MEAN)]
    everything = [one._replace(after_one=_mean_of_rows(groups)) for one in time if one.group == ALL]
    return result._replace(time=[*groups, *everything, mean_of_groups(groups)])


def _mean_of_rows(groups: Sequence[Errors]) -> float | None:
    known = [one for one in groups if one.after_one is not None]
    rows = sum(one.rows for one in known)
    return sum(one.rows * (one.after_one or 0.0) for one in known) / rows if rows else None


def _unseen(at: list[int], residuals: Floats, jacobian: Floats, uncertainty: Floats) -> Unseen:
    shared = jacobian @ uncertainty @ jacobian.T
    sd = np.sqrt(np.diag(shared) + NOISE**2)
    return Unseen(at, residuals, sd, _after_one(residuals, shared))


def _after_one(residuals: Floats, shared: Floats) -> float | None:
    """Mean error of the other rows after `update` by one row: over every choice of it. shared: J S
    J', [rows, rows]."""
    count = len(residuals)
    if count < 2:
        return None
    clipped = np.clip(residuals, -MOST_MISS, MOST_MISS)
    moved = shared / (np.diag(shared) + ROW_NOISE**2) * clipped  # [of row i, by row j]
    errors = error(residuals[:, None] - moved)
    np.fill_diagonal(errors, 0.0)
    return float(errors.sum() / (count * (count - 1)))
