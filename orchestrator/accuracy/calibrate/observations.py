"""Reads rows of a table as observations: a measured step time and a function that predicts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.accuracy.predict.cells import RowError
from orchestrator.accuracy.predict.job_memory import job_memory
from orchestrator.accuracy.predict.predict import step_of
from orchestrator.accuracy.predict.rows import group_of, read_row, row_id
from orchestrator.accuracy.predict.score import measured_in
from orchestrator.cost.path_cache import PathCache
from orchestrator.cost.profile import Profile

from .fit import Observation, linearised
from .update import site_profile, update


def observations(
    rows: Iterable[Mapping[str, str]], refused: list[str] | None = None
) -> list[Observation]:
    """Returns an observation for each row that has a step time and can be read.

    `refused` receives a line for each row that has a step time but cannot be read.
    """
    paths: dict[int, PathCache] = {}
    observed_steps = []
    for number, cells in enumerate(rows, 1):
        name = row_id(cells) or str(number)
        try:
            measured = measured_s(cells)
            if measured is not None:
                observed_steps.append(_observation(name, cells, measured, paths, number - 1))
        except RowError as error:
            if refused is not None:
                refused.append(f"row {number} ({name}): {error}")
    return observed_steps


def _observation(
    name: str,
    cells: Mapping[str, str],
    measured: float,
    paths: dict[int, PathCache],
    row_index: int = 0,
) -> Observation:
    job = read_row(cells)
    return Observation(
        name,
        group_of(cells),
        measured,
        step_of(job, job_memory(job).train, paths),
        row_index,
    )


def measured_s(cells: Mapping[str, str]) -> float | None:
    """Returns the seconds of a row's step, or None if the row has none. Raises RowError for an
    implausible one."""
    return measured_in(cells, "step_time_s")


def after_row(profile: Profile, cells: Mapping[str, str]) -> Profile:
    """Returns `profile` after an update by the measured step of one row, which makes it the profile
    of that row's machines. Raises RowError if the row has no measured step."""
    measured = measured_s(cells)
    if measured is None:
        raise RowError("step_time_s is empty: nothing was measured")
    name = row_id(cells) or "1"
    observation = _observation(name, cells, measured, {})
    residuals, jacobian = linearised([observation], profile.values)
    return site_profile(
        profile,
        update(profile, residuals, jacobian),
        kind="row",
        sources=[name],
        date="",
        name=profile.name,
    )
